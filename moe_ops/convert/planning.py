"""What becomes of every tensor of a source: `plan_tensors` decides from headers and options alone, before a weight is read."""

import math
from collections.abc import Mapping
from typing import Any

from moe_ops.convert.families import UNKNOWN, Family, Patterns, family_of, known_types
from moe_ops.convert.layouts import name_conflicts, outputs, split_groups
from moe_ops.convert.pairing import EXPERT, STACK, Stack, Tensors, is_float, quantization_of, refuse, skipped_by, sort_tensors
from moe_ops.convert.source import ConvertError
from moe_ops.convert.types import Entry, Keep, Options, Output, Part, Source, TensorPlan, Weight
from moe_ops.core.formats import ceil_div

#: A floating tensor of this many elements that no rule knows is an error: experts under a new name must not stay behind unseen.
BIG = 1 << 20

_SHORT = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


def plan_tensors(config: Mapping[str, Any], tensors: Mapping[str, Source], options: Options) -> TensorPlan:
    """Decide what becomes of each tensor: every one of them is in the result, whole, or the source is refused.

    Args:
        config: content of config.json, with the `quantization_config` filled in from hf_quant_config.json where it lacks one.
        tensors: name -> tensor, in the order of the files and of the data in them.
        options: what is asked for.

    Raises:
        ConvertError: a model type without a row in the family table and no `include`; a pattern that matches nothing; a quantization that
            is not read; an orphan, missing or wrongly shaped scale; a big tensor that no rule knows; experts of one layer that would be
            quantized in part, or one of them missing; nothing to quantize. The text names file and tensor.
    """
    family = family_of(config)
    if family is None and not options.include:
        raise ConvertError(
            f"convert: model_type {config.get('model_type')!r} is not in the family table ({known_types()}); "
            f"say with --include which modules are to be quantized"
        )
    return _Planner(config, tensors, options, family).plan()


class _Planner:
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Source], options: Options, family: Family | None) -> None:
        self.config, self.tensors, self.options = config, tensors, options
        self.row = family
        self.family = family or UNKNOWN
        self.include, self.exclude = Patterns("include", options.include), Patterns("exclude", options.exclude)
        left = skipped_by(quantization_of(config))
        self.sorted: Tensors = sort_tensors(config, tensors, lambda module: self.exclude.match(module) is not None or left(module))
        self.entries: dict[str, list[Entry]] = {}
        self.kept: set[str] = set()
        self.warnings: list[str] = []

    def plan(self) -> TensorPlan:
        for module, source in self.sorted.weights.items():
            self._matrix(module, source)
        for stack in self.sorted.stacks.values():
            self._stack(stack)
        for source in self.sorted.rest:
            self._rest(source)
        self.include.check_used()
        self.exclude.check_used()
        entries = tuple(e for name in self.tensors for e in self.entries.get(name, ()))
        quantized = [e for e in entries if isinstance(e, Weight) and e.data_scale is not None]
        if not quantized:
            reasons = sorted({e.reason for e in entries})
            raise ConvertError(f"convert: nothing would be quantized; tensors are kept because: {'; '.join(reasons) or 'there are none'}")
        self._check_experts([e.name for e in quantized])
        self._check_names(entries)
        self._warn(quantized, [e for e in entries if isinstance(e, Weight) and e.action == "dequantize"])
        return TensorPlan(entries, self.sorted.dialect, self.row and self.row.name, tuple(sorted(self.kept)), tuple(self.warnings))

    # ---- decisions

    def _why_kept(self, module: str, source: Source, k: int, expert: bool) -> str | None:
        """Why a weight [N, K] is kept, or None where it is quantized."""
        options = self.options
        excluded, included = self.exclude.match(module), self.include.match(module)
        if excluded is not None:
            return f"excluded by {excluded}"
        never = self.family.why_kept(module, options.format)
        if never is not None:
            return f"never quantized: {never}"
        if options.only == "experts" and not expert:
            return "not a routed expert"
        if self.include and included is None:
            return "matched by no --include"
        if self.sorted.dialect.format is not None and is_float(source) and included is None:
            return "left unquantized by the source"
        if options.format == "mxfp8" and k % 32:
            if expert or included is not None:
                kept = "keep all experts with --exclude 're:(.*\\.)?experts\\..*'" if expert else f"--exclude {module}"
                raise refuse(source, f"has K = {k}, but mxfp8 has blocks of 32 along K; use --format fp8_block, or {kept}")
            return f"K = {k} is no multiple of 32"
        return None

    def _matrix(self, module: str, source: Source) -> None:
        expert = EXPERT.fullmatch(module) is not None
        n, k = source.shape
        scale = self.sorted.scales.get(module)
        why = self._why_kept(module, source, k, expert)
        if why is not None:
            self.kept.add(module)
        if why is not None and scale is None:
            self._add(source, Keep(source, Part(), Output(source.name, source.dtype, source.shape), why))
        else:
            self._add(source, self._weight(module, source, Part(), scale, Part(), (n, k), why, expert))

    def _weight(
        self, module: str, source: Source, part: Part, scale: Source | None, scale_part: Part, shape: tuple[int, int], why: str | None, expert: bool
    ) -> Weight:
        if why is not None:
            data, data_scale = Output(f"{module}.weight", "BF16", shape), None
        else:
            data, data_scale = outputs(module, shape, self.options)
        fmt = self.sorted.dialect.format
        held = _SHORT[source.dtype] if scale is None or fmt is None else fmt.name
        action = "quantize" if scale is None else "reencode" if why is None else "dequantize"
        return Weight(module, source, part, scale, scale_part, held, action, data, data_scale, expert, why or "")

    def _rest(self, source: Source) -> None:
        module = source.name.removesuffix(".weight")
        never, excluded = self.family.why_kept(module, self.options.format), self.exclude.match(module)
        if excluded is not None:
            why = f"excluded by {excluded}"
        elif never is not None:
            why = f"never quantized: {never}"
        elif is_float(source) and len(source.shape) > 1 and math.prod(source.shape) >= BIG:
            raise refuse(source, f"of shape {list(source.shape)} is big and of no kind that is known; keep it with --exclude {module}")
        else:
            why = "no matrix" if is_float(source) else f"{source.dtype} is copied"
        # what only an exclusion lets pass is named in the result, which is read by the same rules
        named = source.dtype.startswith("F8_") or STACK.fullmatch(module)
        if len(source.shape) > 1 and (source.name.endswith(".weight") or named):
            self.kept.add(module)
        self._add(source, Keep(source, Part(), Output(source.name, source.dtype, source.shape), why))

    def _add(self, source: Source, entry: Entry) -> None:
        self.entries.setdefault(source.name, []).append(entry)

    # ---- stacks of experts

    def _stack(self, stack: Stack) -> None:
        up, down = stack.weights.get("gate_up_proj"), stack.weights.get("down_proj")
        if up is None or down is None:
            there = next(iter((*stack.weights.values(), *stack.biases.values())))
            raise refuse(there, f"has no {stack.experts}.{'down_proj' if down is None else 'gate_up_proj'} of three dimensions beside it")
        layout = self.family.stacks
        e = up.shape[0]
        rows, h = up.shape[1:][::-1] if layout.transposed else up.shape[1:]
        inter = rows // 2
        wanted = (e, inter, h) if layout.transposed else (e, h, inter)
        if rows % 2 or down.shape != wanted:
            kind = "transposed stacks" if layout.transposed else "stacks"
            raise refuse(down, f"of shape {list(down.shape)} does not belong to {up.name!r} of {list(up.shape)} as {kind} of {self.family.name}")
        for leaf, bias in stack.biases.items():
            if bias.shape != (e, rows if leaf == "gate_up_proj" else h):
                raise refuse(bias, f"must have shape {[e, rows if leaf == 'gate_up_proj' else h]}, got {list(bias.shape)}")
        self._check_count(stack.experts, e, up)

        gate, upper, lower = self.family.leaves
        names = [f"{stack.experts}.{i}.{leaf}" for i in range(e) for leaf in self.family.leaves]
        why = [self._why_kept(name, down if name.endswith(f".{lower}") else up, inter if name.endswith(f".{lower}") else h, True) for name in names]
        if all(why) and not stack.scales:
            self.kept.add(stack.experts)
            for source in (*stack.weights.values(), *stack.biases.values()):
                self._add(source, Keep(source, Part(), Output(source.name, source.dtype, source.shape), why[0] or ""))
            return
        if any(why) and not all(why):
            raise refuse(up, self._in_part(stack.experts, sum(w is None for w in why), len(why), next(w for w in why if w)))
        if self.row is None:
            raise refuse(up, f"is a stack of experts, whose layout is unknown for model_type {self.config.get('model_type')!r}")
        if stack.scales and layout.transposed:
            raise refuse(up, "is quantized in a transposed stack, whose scale blocks run along the wrong dimension")
        if why[0] is not None:
            self.kept.add(stack.experts)
        step = 2 if layout.interleaved else 1
        for i in range(e):
            for leaf, start in ((gate, 0), (upper, 1 if layout.interleaved else inter)):
                part = Part(i, layout.transposed, start, step, inter)
                self._piece(stack, "gate_up_proj", f"{stack.experts}.{i}.{leaf}", part, (inter, h), why[0])
            self._piece(stack, "down_proj", f"{stack.experts}.{i}.{lower}", Part(i, layout.transposed), (h, inter), why[0])

    def _piece(self, stack: Stack, leaf: str, module: str, part: Part, shape: tuple[int, int], why: str | None) -> None:
        """One matrix of one expert, and its bias."""
        source, scale, bias = stack.weights[leaf], stack.scales.get(leaf), stack.biases.get(leaf)
        scale_part = part
        fmt = self.sorted.dialect.format
        if scale is not None and fmt is not None and part.rows is not None:
            block = fmt.weight_block[0]
            # gate and up have tiles of their own: `sort_tensors` refused a scale that covers both
            rows = ceil_div(part.rows, block)
            scale_part = Part(part.index, False, rows if part.start and block > 1 else part.start, part.step, rows)
        self._add(source, self._weight(module, source, part, scale, scale_part, shape, why, True))
        if bias is not None:
            out = Output(f"{module}.bias", bias.dtype, shape[:1])
            self._add(bias, Keep(bias, Part(part.index, False, part.start, part.step, part.rows), out, "bias"))

    # ---- checks of the whole

    def _in_part(self, experts: str, some: int, total: int, why: str) -> str:
        return f"belongs to {experts}, of which {some} of {total} weights would be quantized and the rest not ({why}); quantize all or none"

    def _check_count(self, experts: str, count: int, source: Source) -> None:
        text = self.config.get("text_config")
        for part in (self.config, text if isinstance(text, Mapping) else {}):
            for key in ("n_routed_experts", "num_local_experts", "num_experts"):
                wanted = part.get(key)
                if isinstance(wanted, int) and wanted != count:
                    raise refuse(source, f"belongs to {experts} with {count} experts, but config.json says {key} = {wanted}")
                if wanted is not None:
                    return

    def _check_experts(self, quantized: list[str]) -> None:
        """Experts stored one by one: none is missing, and of one layer all or none are quantized."""
        layers: dict[str, dict[int, set[str]]] = {}
        for module in self.sorted.weights:
            m = EXPERT.fullmatch(module)
            if m:
                layers.setdefault(m["experts"], {}).setdefault(int(m["index"]), set()).add(m["leaf"])
        chosen = set(quantized)
        for experts, found in layers.items():
            first = next(iter(found))
            source = self.sorted.weights[f"{experts}.{first}.{next(iter(found[first]))}"]
            self._check_count(experts, max(found) + 1, source)
            leaves = set().union(*found.values())
            for i in range(max(found) + 1):
                lacking = leaves - found.get(i, set())
                if lacking:
                    raise refuse(source, f"belongs to {experts}, whose expert {i} lacks {', '.join(sorted(lacking))}")
            names = [f"{experts}.{i}.{leaf}" for i in found for leaf in found[i]]
            some = sum(n in chosen for n in names)
            if 0 < some < len(names):
                why = next(self._reason(n) for n in names if n not in chosen)
                raise refuse(source, self._in_part(experts, some, len(names), why))
            if not some:
                self.kept = (self.kept - set(names)) | {experts}

    def _reason(self, module: str) -> str:
        return self.entries[self.sorted.weights[module].name][0].reason

    def _check_names(self, entries: tuple[Entry, ...]) -> None:
        seen: dict[str, Entry] = {}
        for entry in entries:
            for out in (entry.data, entry.data_scale if isinstance(entry, Weight) else None):
                if out is None:
                    continue
                if out.name in seen:
                    raise ConvertError(f"convert: two tensors would be written as {out.name!r}")
                seen[out.name] = entry

    def _warn(self, quantized: list[Weight], dequantized: list[Weight]) -> None:
        options = self.options
        by_reason: dict[str, list[Weight]] = {}
        for w in dequantized:
            by_reason.setdefault(w.reason, []).append(w)
        for reason, found in by_reason.items():
            count = f"{len(found)} weights, {found[0].name} first, are" if len(found) > 1 else f"{found[0].name} is"
            self.warnings.append(f"{count} {found[0].fmt} in the source and bf16 in the result: {reason}")
        names = [w.name for w in quantized]
        for group in split_groups(names, self.kept)[:3]:
            self.warnings.append(f"{group}: servers fuse these into one layer and refuse to load some quantized, some not")
        for name in name_conflicts(names, self.kept)[:3] if options.layout == "modelopt" else ():
            self.warnings.append(f"{name} is kept, and its name stands inside that of a quantized module, which vLLM would skip as well")
        if options.format == "fp8_block" and any(w.expert for w in quantized):
            if options.layout == "modelopt":
                self.warnings.append(
                    "FP8 blocks of experts under ModelOpt's names (FP8_PB_WO) load in moe_ops; vLLM 0.33 and SGLang 0.5.23 refuse them"
                )
            width = {w.name: w.data.shape[w.name.endswith((".down_proj", ".w2"))] for w in quantized if w.expert}
            ragged = next((name for name, inter in width.items() if inter % 128), None)
            if ragged is not None:
                loads = "moe_ops loads such FP8 blocks, servers and the FP8 kernels of Transformers do not"
                self.warnings.append(f"{ragged}: I = {width[ragged]} is no multiple of 128: {loads}")
        if self.family.name == "gpt_oss":
            self.warnings.append(
                "experts of gpt_oss have biases: load the result with moe_ops.hf.load_quantized; Transformers' FP8 experts lack them"
            )
