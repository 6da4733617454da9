"""Rules about the tree itself: links, layers, lengths, names, docstrings, documents. Nothing here imports the package."""

import ast
import functools
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "moe_ops"

#: Top to bottom; a module imports its own layer and the ones below, and siblings of one layer do not import each other.
LAYERS = (("__main__",), ("cli",), ("demo",), ("bench", "convert", "tune"), ("hf",), ("layer",), ("ep", "gemm"), ("router", "quant"), ("core",))
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}

#: Libraries that are optional, and the only files that may import them.
OPTIONAL = {"transformers": "hf/", "accelerate": "hf/", "deep_gemm": "gemm/deep_gemm", "cutlass": "gemm/cutlass", "deep_ep": "ep/"}

TEXT = (".py", ".md", ".toml", ".yaml", ".yml", ".cu", ".cuh", ".json", "")


def files(*suffixes):
    """Files of the repository that are ours: no dot folders but .ci, no build products, no links."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            f for f in folders if (not f.startswith(".") or f == ".ci") and f not in ("build", "dist", "__pycache__") and not f.endswith(".egg-info")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in suffixes and not path.is_symlink() and not (name.startswith(".") and name != ".pre-commit-config.yaml"):
                yield path


def where(path):
    return str(path.relative_to(ROOT))


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules():
    return list(PACKAGE.rglob("*.py"))


def imports(node, of):
    """Absolute names imported anywhere below `node`, those under `if TYPE_CHECKING` left out."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.orelse:
            yield from imports(child, of)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{of}:{node.lineno}: imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, of)


@pytest.mark.parametrize("name", ("quant", "router", "gemm"))
def test_top_level_links_are_relative_and_lead_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink() and os.readlink(link) == f"moe_ops/{name}"
    assert (link / "__init__.py").samefile(PACKAGE / name / "__init__.py")


def test_no_import_goes_upwards_or_to_a_sibling_layer():
    wrong = []
    for path in modules():
        own = module_name(path).split(".")[1:2]
        for name in imports(tree(path), where(path)):
            parts = name.split(".")
            if parts[0] in ("quant", "router", "gemm", "tests", "benchmarks"):
                wrong.append(f"{where(path)} imports {name}")
            if parts[0] != "moe_ops" or len(parts) < 2 or not own or parts[1] not in RANK:
                continue
            if parts[1] != own[0] and RANK[parts[1]] <= RANK[own[0]]:
                wrong.append(f"{where(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_part_of_the_package_has_a_layer():
    parts = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} <= set(RANK)


def test_optional_libraries_are_imported_in_their_wrapper_only():
    wrong = []
    for path in modules():
        for name in imports(tree(path), where(path)):
            home = OPTIONAL.get(name.split(".")[0])
            if home and not str(path.relative_to(PACKAGE)).startswith((home, "demo", "bench/", "convert/")):
                wrong.append(f"{where(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_files_stay_under_400_lines():
    long = [f"{where(p)}: {n}" for p in files(".py", ".cu", ".cuh") if (n := len(p.read_text().splitlines())) >= 400]
    assert not long, "split by what they do:\n" + "\n".join(long)


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_test_files_have_names_of_their_own_folder():
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert all(re.fullmatch(r"test_[a-z0-9_]+\.py", n) for n in names)


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:work|root|home|tmp|Users)/",
    "unfinished work": r"\b(?:TODO|FIXME|XXX|HACK)\b",
    "a number that only the authors know": r"\bissues? #?\d+|(?<![\w/&])#\d+\b(?!\w)",
    "a reference to bug lists outside the repository": r"\bB\d{2}\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_text_holds(what):
    found = []
    for path in files(*TEXT):
        if path == Path(__file__).resolve() or path.name == "LICENSE" or "results" in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(FORBIDDEN[what], line):
                found.append(f"{where(path)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def jit_kernels(module):
    return [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in n.decorator_list)]


def test_every_function_but_kernels_is_annotated():
    wrong = []
    for path in modules():
        kernels = {id(inner) for kernel in jit_kernels(tree(path)) for inner in ast.walk(kernel)}
        for node in ast.walk(tree(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or id(node) in kernels:
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or node.returns is None:
                wrong.append(f"{where(path)}:{node.lineno} {node.name}: {', '.join(bare) or 'return'}")
    assert not wrong, "no annotation:\n" + "\n".join(wrong)


def registered_ops():
    """(file, op name, call) of every registration in the package."""
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "register" and any(k.arg == "fake" for k in node.keywords):
                yield path, ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0]), node


def test_every_op_has_reference_test_and_benchmark():
    missing = []
    for path, op, call in registered_ops():
        part, stem = path.parent.name, path.stem
        reference = next((ast.unparse(k.value) for k in call.keywords if k.arg == "cpu"), "")
        if not any(isinstance(n, ast.FunctionDef) and n.name.endswith(("_ref", "_cpu")) for n in ast.walk(tree(path))) and "_ref" not in reference:
            missing.append(f"{op}: no reference beside it in {where(path)}")
        for wanted in (ROOT / "tests" / part / f"test_{stem}.py", ROOT / "benchmarks" / part / f"bench_{stem}.py"):
            if not wanted.exists():
                missing.append(f"{op}: no {where(wanted)}")
        if not any("opcheck" in test.read_text() for test in (ROOT / "tests" / part).glob(f"test_{stem}*.py")):
            missing.append(f"{op}: no opcheck in tests/{part}/test_{stem}*.py")
    assert not missing, "\n".join(sorted(set(missing)))


PUBLIC_SECTIONS = ("Args:", "Returns:", "Raises:", "Numerics:", "Cost:")


def public_functions():
    """Functions behind the lazy names of the package, with their files."""
    table = next(
        ast.literal_eval(n.value) for n in tree(PACKAGE / "__init__.py").body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_HOME"
    )
    for name, home in sorted(table.items()):
        path = ROOT / (home.replace(".", "/") + ".py")
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield name, node


def test_every_public_op_documents_arguments_result_errors_numerics_and_cost():
    short = []
    for name, node in public_functions():
        if name in ("freeze", "warmup", "make_qtensor"):
            continue
        doc = ast.get_docstring(node) or ""
        lacking = [s for s in PUBLIC_SECTIONS if s not in doc]
        arguments = [a.arg for a in [*node.args.args, *node.args.kwonlyargs]]
        undescribed = [a for a in arguments if not re.search(rf"^\s*\*{{0,2}}(?:\w+, )*{a}\b.*:", doc, re.MULTILINE)]
        if lacking or undescribed:
            short.append(f"{name}: lacks {', '.join(lacking + undescribed)}")
    assert not short, "\n".join(short)


def run_on_the_gpu():
    """Functions that a CUDA call of an op goes through: from each registration's `cuda=`, followed by name, references left out."""
    defined = {}
    for part in ("quant", "router", "gemm", "layer", "ep"):
        for path in (PACKAGE / part).rglob("*.py"):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.FunctionDef) and not jit_kernels(ast.Module([node], [])):
                    defined.setdefault(node.name, []).append((path, node))
    todo = [ast.unparse(k.value) for _, _, call in registered_ops() for k in call.keywords if k.arg == "cuda"]
    todo += [name for name in defined if name.endswith(("_triton", "_into"))]
    seen = set()
    while todo:
        name = todo.pop()
        if name in seen or "_ref" in name or name.endswith("_cpu"):
            continue
        seen.add(name)
        for path, node in defined.get(name, ()):
            yield path, node
            calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
            todo += [c.id if isinstance(c, ast.Name) else c.attr for c in calls if isinstance(c, (ast.Name, ast.Attribute))]


#: What a GPU path of this library never calls: library sorts and counts, and anything that makes the host wait for the device.
SORTS = {"topk", "sort", "argsort", "bincount", "nonzero", "unique", "histc"}
SYNCS = {"item", "cpu", "tolist", "numpy", "synchronize", "masked_select"}


def test_gpu_paths_call_no_library_sort_and_never_wait_for_the_device():
    wrong = []
    for path, node in run_on_the_gpu():
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in SORTS | SYNCS:
                wrong.append(f"{where(path)}:{call.lineno} {node.name} calls {ast.unparse(call.func)}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_documents_name_paths_that_exist():
    missing = []
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
        code = re.findall(r"`((?:moe_ops|tests|benchmarks|\.ci)/[\w./-]*)`", text)
        missing += [f"{name}: {path}" for path in links + code if not (ROOT / path).exists() and "results" not in path]
    assert not missing, "\n".join(missing)
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 150


def test_documents_name_the_environment_variables_that_are_read():
    used = {v for p in modules() for v in re.findall(r"MOE_OPS_[A-Z_]+", p.read_text())}
    assert used == {"MOE_OPS_ARCH", "MOE_OPS_CACHE"}
    for document in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"MOE_OPS_[A-Z_]+", (ROOT / document).read_text())) == used, document
