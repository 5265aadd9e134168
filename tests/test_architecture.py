"""How the package is built: who imports whom, what is private, how big things may be."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from measured import num_code_lines, sizes, steady_step

import composable_shard
from composable_shard._torch import poisoned_memory

ROOT = Path(composable_shard.__file__).parent
PACKAGE = ROOT.name
TESTS = Path(__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

# From the top down; a module may import what stands below its own layer, and its own layer.
LAYERS = ["commands", "api", "insight", "compat", "train", "optim", "testing"]
LAYERS += ["wire", "hybrid", "core", "bottom"]
COMMANDS = {"cli", "run", "__main__"}
API = {"api", "module"}
BOTTOM = {"mesh", "policy", "errors", "arguments", "_torch"}
MAY_IMPORT_API = {"commands", "insight", "train", "compat", "testing"}

MAX_CODE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PRIVATE_PARAMETERS = 8

# Signatures that are those of another library.
GIVEN = {("compat/fsdp1/module.py", "FullyShardedDataParallel", "__init__")}


@cache
def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


@cache
def nodes(module: Path) -> list[ast.AST]:
    return list(ast.walk(tree(module)))


def imports(module: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each imported module with the names taken from it, wherever the import stands."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} is relative"
            assert node.module is not None
            yield node.module, tuple(alias.name for alias in node.names)


def layer_of(dotted: str) -> str:
    """Return the layer of ``composable_shard.x.y``; the package itself is the public surface."""
    parts = dotted.split(".")
    if len(parts) == 1 or parts[1] in API:
        return "api"
    if parts[1] in COMMANDS:
        return "commands"
    return "bottom" if parts[1] in BOTTOM else parts[1]


def own_imports(module: Path) -> set[str]:
    """Return the modules of the package that a module imports, also when it names them."""
    found = set()
    for name, members in imports(module):
        if name.split(".")[0] != PACKAGE:
            continue
        inner = {f"{name}.{member}" for member in members if f"{name}.{member}" in NAMES}
        found |= inner or {name}
    return found


def name_of(module: Path) -> str:
    parts = [PACKAGE, *module.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(module) for module in MODULES}


def functions(
    module: Path,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    """Yield ``(where, function, class it is a method of)``; nested functions too."""
    owners = {
        child: owner
        for owner in nodes(module)
        if isinstance(owner, ast.ClassDef)
        for child in owner.body
    }
    for node in nodes(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{module}:{node.lineno} {node.name}", node, owners.get(node)


def test_every_module_has_a_layer() -> None:
    for module in MODULES:
        assert layer_of(name_of(module)) in LAYERS, module


def test_imports_run_downward() -> None:
    for module in MODULES:
        own = layer_of(name_of(module))
        if module == Path("__init__.py"):
            continue  # the public names of all layers
        for imported in own_imports(module):
            target = layer_of(imported)
            if target == "api":
                assert own in {"api"} | MAY_IMPORT_API, f"{module} imports {imported}"
            else:
                assert LAYERS.index(target) >= LAYERS.index(own), f"{module} imports {imported}"


def test_the_core_imports_in_no_circle() -> None:
    """Modules import each other at run time in an order; annotations alone may look up."""
    graph = {name_of(module): runtime_imports(module) for module in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for imported in graph.get(name, set()):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


# From the top down: each imports only what stands below it.
CORE = [
    *("copying", "hooks", "state_dict", "shard", "tree", "backward"),
    *("tape", "optimizers", "agreement", "group", "program"),
    "extension",
    *("user_changes", "reduction", "storage", "codec", "nested", "placement", "layout", "plugins"),
    *("transport.channel", "transport.gloo.point_to_point", "transport.gloo.exchange"),
    *("transport.gloo.mailbox", "transport.gloo.shared_memory"),
    *("transport.collectives", "transport.host", "transport.pending", "transport.process_groups"),
    *("transport.failures", "transport.background"),
]


def test_the_modules_of_the_core_stand_above_one_another() -> None:
    for module in MODULES:
        own = name_of(module).removeprefix(f"{PACKAGE}.core.")
        if module.parts[0] != "core" or module.stem == "__init__":
            continue
        for imported in own_imports(module):
            name = imported.removeprefix(f"{PACKAGE}.core.")
            if name != imported:
                assert CORE.index(name) > CORE.index(own), f"{module}: {imported}"


INSIDE = re.compile(rf"{PACKAGE}\.core(\.(?!transport\b)|$)")


def test_no_test_but_the_pure_ones_imports_the_core() -> None:
    """Others see what users see, and the transport, which is a layer of its own."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        if path.is_relative_to(TESTS / "pure") or "core" not in text:
            continue
        names: list[str] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call):  # as of import_module and mock.patch
                first = [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
                names += [name for name in first if isinstance(name, str)]
        assert not [name for name in names if INSIDE.match(name)], path


def runtime_imports(module: Path) -> set[str]:
    """Return what a module imports of the package when it is itself imported."""
    found: set[str] = set()
    for node in tree(module).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == PACKAGE:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & NAMES or {str(node.module)}
    return found


def test_pure_modules_import_neither_torch_nor_the_rest_of_the_core() -> None:
    for module in ("layout", "tape"):
        names = {name.split(".")[0] for name, _ in imports(Path(f"core/{module}.py"))}
        assert names <= set(sys.stdlib_module_names), module


def test_only_the_class_to_inherit_from_comes_from_the_fsdp_of_torch() -> None:
    taken = {
        (layer_of(name_of(module)), name, members)
        for module in MODULES
        for name, members in imports(module)
        if name.startswith("torch.distributed.fsdp")
        or name == "torch.distributed._composable"
        or (name == "torch.distributed" and "fsdp" in members)
    }
    inherited = ("torch.distributed.fsdp", ("FSDPModule",))
    assert taken == {("api", *inherited)}
    named = [module for module in MODULES if "distributed.fsdp" in (ROOT / module).read_text()]
    for module in named:
        for node in nodes(module):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert "distributed.fsdp" not in text, f"{module}: {text}"


# What a part of the package uses if it is there, and names the extra of if it is not.
LATE = {"rich", "transformers"}


def imports_at_once(module: Path) -> set[str]:
    """Return what is imported with the module, not in one of its functions."""
    found = set()
    for node in tree(module).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    return found


def third_party(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)


def test_the_runtime_needs_torch_and_einops_alone() -> None:
    mine = [module for module in MODULES if module.parts[0] != "testing"]
    at_once = {name for module in mine for name in imports_at_once(module)}
    assert third_party(at_once) == {PACKAGE, "torch", "einops"}
    late = {name for module in mine for name, _ in imports(module)} - at_once
    assert third_party(late) - {PACKAGE, "torch"} <= LATE
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=!~ ]", requirement)[0] for requirement in project["dependencies"]]
    assert sorted(names) == ["einops", "torch"]


def is_private(part: str) -> bool:
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


# Private by spelling, public by documentation or for want of another way.
SHARED_NAMES = {"_parameters", "_buffers", "_version", "_base", "_fields", "_apply", "_getframe"}
SHARED_NAMES |= {"_asdict", "_replace"}  # of a NamedTuple, as _fields is
SHARED_NAMES |= {"_exit"}  # of os, and documented


def test_private_names_stay_where_they_are() -> None:
    strangers = []
    for module in MODULES:
        if module.parts[0] == "_torch":
            continue
        for name, members in imports(module):
            if name.split(".")[0] == "torch":
                parts = [*name.split("."), *members]
                assert not any(map(is_private, parts)), f"{module} imports {name} {members}"
        for node in nodes(module):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()") and node.attr not in SHARED_NAMES:
                strangers.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    assert strangers == []


# What makes memory without values, or frees it.
COMES_AND_GOES = {"empty", "empty_like", "empty_strided", "new_empty", "resize_"}


def test_memory_comes_and_goes_in_one_place() -> None:
    for module in MODULES:
        if module.parts[0] not in ("core", "train"):
            continue
        calls = [
            ast.unparse(node)
            for node in nodes(module)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in COMES_AND_GOES
            and ast.unparse(node.func.value) != "_torch"
        ]
        calls = [call for call in calls if "device='meta'" not in call]
        calls = [call for call in calls if not call.startswith("torch.empty(0,")]
        poisoned = "_torch.poison_uninitialized(torch.empty_like("
        assert not calls or poisoned in ast.unparse(tree(module)), module


def test_nothing_exceeds_the_budget() -> None:
    """The figures of ``budget.toml`` only fall: whoever lowers one lowers its limit with it."""
    with poisoned_memory(False):  # which would add calls to the step
        figures = sizes() | steady_step()
    limits = tomllib.loads((TESTS / "budget.toml").read_text())
    assert figures.keys() == limits.keys()
    assert {name: n for name, n in figures.items() if n > limits[name]} == {}, limits


def test_files_and_functions_stay_small() -> None:
    for module in MODULES:
        assert num_code_lines(ROOT / module) <= MAX_CODE_LINES, module
        for where, function, _ in functions(module):
            assert function.end_lineno is not None
            num_lines = function.end_lineno - function.lineno + 1
            if ast.get_docstring(function) is not None:
                docstring = function.body[0]
                assert docstring.end_lineno is not None
                num_lines -= docstring.end_lineno - docstring.lineno + 1
            assert num_lines <= MAX_FUNCTION_LINES, f"{where}: {num_lines} lines"


def test_functions_take_few_parameters() -> None:
    for module in MODULES:
        for where, function, owner in functions(module):
            arguments = function.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            names = [argument.arg for argument in named if argument.arg not in ("self", "cls")]
            is_interface = (
                module.stem in API
                or module.parts[0] == "testing"
                or function.name in composable_shard.__all__
            )
            is_public = is_interface and owner is None and not is_private(function.name)
            is_given = owner is not None and (str(module), owner.name, function.name) in GIVEN
            if not is_public and not is_given:
                assert len(names) <= MAX_PRIVATE_PARAMETERS, f"{where}: {names}"


def test_nothing_is_left_to_do() -> None:
    for module in MODULES:
        text = (ROOT / module).read_text()
        found = re.findall(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b", text)
        assert found == [], module


def test_everything_public_has_a_docstring() -> None:
    missing = [
        f"{module}:{node.lineno} {node.name}"
        for module in MODULES
        for node in tree(module).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not is_private(node.name)
        and ast.get_docstring(node) is None
        and not is_overload(node)
    ]
    missing += [str(module) for module in MODULES if not ast.get_docstring(tree(module))]
    assert missing == []


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def test_every_public_method_has_a_docstring() -> None:
    missing = [
        f"{owner.__name__}.{name}"
        for owner in map(composable_shard.__getattr__, composable_shard.__all__)
        if isinstance(owner, type)
        for name, method in vars(owner).items()
        if callable(method) and not name.startswith("_") and not method.__doc__
    ]
    # An implementation says what its interface says.
    assert missing == []


def test_the_public_names_exist_and_are_sorted() -> None:
    assert composable_shard.__all__ == sorted(composable_shard.__all__)
    for name in composable_shard.__all__:
        assert getattr(composable_shard, name).__module__.startswith(PACKAGE)


IMPORT = re.compile(r"^ *(?:from (\S+) import|import (.+))", re.MULTILINE)


def test_no_test_module_is_borrowed_by_another() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        for source, names in IMPORT.findall(path.read_text()):
            for name in [source, *names.split(", ")]:
                assert not name.split(".")[-1].startswith("test_"), f"{path}: {name}"
