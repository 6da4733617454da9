"""A folder of safetensors files as one read-only mapping from tensor name to tensor, read lazily."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class CheckpointFolder(Mapping[str, torch.Tensor]):
    """name -> tensor of all files of a checkpoint; each access reads one tensor, nothing is kept.

    Args:
        path: a folder with `model.safetensors.index.json` and its shards, or with safetensors files alone.

    Raises:
        FileNotFoundError: no such folder, no safetensors file in it, or a shard that the index names is missing.
        ValueError: a name in two files, or an index that names a tensor that its file does not hold.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = self.path / "model.safetensors.index.json"
        declared: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        files = sorted(set(declared.values())) or sorted(p.name for p in self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"checkpoint: {self.path} holds no *.safetensors file")
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in files:
            if not (self.path / file).is_file():
                raise FileNotFoundError(f"checkpoint: shard {self.path / file} is missing")
            self._files[file] = safe_open(self.path / file, framework="pt", device="cpu")
            for name in self._files[file].keys():  # noqa: SIM118 (not a dict)
                if name in self._where:
                    raise ValueError(f"checkpoint: tensor {name!r} is in {self._where[name]} and in {file}")
                self._where[name] = file
        for name, file in declared.items():
            if self._where.get(name) != file:
                raise ValueError(f"checkpoint: {index.name} says that {name!r} is in {file}, but it is not")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[self._where[name]].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def config(self, file: str) -> dict[str, Any]:
        """The content of a JSON file of the folder; {} where it is missing."""
        path = self.path / file
        return json.loads(path.read_text()) if path.exists() else {}


class Renamed(Mapping[str, torch.Tensor]):
    """Another mapping under other names: `names` maps a name here to the name there."""

    def __init__(self, source: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
        self.source, self.names = source, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.source[self.names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
