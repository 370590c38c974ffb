"""The public names: exactly these, each where it says, none shadowed by a room of the same name."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import gradstow

PACKAGE = Path(__file__).parents[2] / "src" / "gradstow"
FUNCTIONS = {"frontier", "max_batch", "measure_peak", "memory", "plain", "plan", "profile", "stow", "unstow", "verify"}
CLASSES = {"Plan", "Policy", "TrainStep"}
NAMES = FUNCTIONS | CLASSES | {"__version__", "errors", "layers", "train"}


def resolve(name: str) -> object:
    home = gradstow._HOMES.get(name, "gradstow")
    spec = find_spec(home)
    if spec is None or spec.origin is None:  # a folder without __init__.py has no origin
        pytest.skip(f"{home} is not written yet")
    return getattr(gradstow, name)


def test_all_and_dir_list_exactly_the_public_names() -> None:
    assert set(gradstow.__all__) == NAMES
    assert len(gradstow.__all__) == len(NAMES)
    assert set(dir(gradstow)) == NAMES
    import_module("gradstow.errors")  # a loaded sub-module does not join the names
    assert set(dir(gradstow)) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_resolves_and_stays(name: str) -> None:
    found = resolve(name)
    assert found is getattr(gradstow, name)
    assert callable(found) == (name in FUNCTIONS | CLASSES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'gradstow' has no attribute 'stowe'"):
        gradstow.stowe  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'stowe'"):
        exec("from gradstow import stowe", {})


def shadowed(package: Path, names: set[str]) -> set[str]:
    """Names that importing a sub-module of the package would bind to that module."""
    return {path.stem for path in package.iterdir()} & names


def test_no_room_shadows_a_public_name() -> None:
    assert shadowed(PACKAGE, NAMES) == {"errors", "layers", "train"}, "rooms that are names on purpose"


def test_a_room_that_shadows_is_seen(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "verify.py").touch()
    assert shadowed(tmp_path, NAMES) == {"plan", "verify"}


def test_plan_stays_the_function_when_the_planner_is_loaded() -> None:
    function = resolve("plan")
    import_module("gradstow.planner")
    assert gradstow.plan is function


def test_type_checkers_see_the_same_homes() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {**gradstow._HOMES, "errors": "gradstow", "layers": "gradstow", "train": "gradstow"}


def test_errors_are_all_there_and_share_one_base() -> None:
    private = import_module("gradstow._errors")
    public = {n for n, kind in vars(private).items() if isinstance(kind, type) and not n.startswith("_")}
    assert set(gradstow.errors.__all__) == public
    for name in public:
        assert getattr(gradstow.errors, name) is getattr(private, name)
        assert issubclass(getattr(gradstow.errors, name), gradstow.errors.GradstowError)
