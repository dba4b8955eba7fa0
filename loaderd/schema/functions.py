"""Whether two functions of a user do the same, although they are two objects, maybe of two programs.

A schema that is made twice by the same program has lambdas that were made twice. They do the same if they have the
same code and see equal values; NaN equals NaN. Functions of which that is not certain count as different.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np


def name_of(function: Any) -> str:
    """The module and name of a function, or of the class of what is called like one: alike in each process."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or '?'}.{name}"


def same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether both have the same code, equal defaults, equal values in their closures, and the same module."""
    try:
        return _same(one, other)
    except Exception:  # a function in its own closure, a variable without a value, or ``==`` of a user's class
        return False


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        return all(map(_same, (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)))
    if isinstance(one, FunctionType):
        return one.__globals__ is other.__globals__ and all(map(_same, _seen_by(one), _seen_by(other)))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (float, complex, np.generic, np.ndarray)):
        return _same_array(np.asarray(one), np.asarray(other))
    return bool(one == other)


def _seen_by(function: FunctionType) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells


def _same_array(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    stored_alike = not one.dtype.hasobject and one.tobytes() == other.tobytes()  # so NaN equals NaN
    return stored_alike or np.array_equal(one, other)


def digest_of(value: Any) -> str | None:
    """A digest, in hex, of plain values, arrays, and all that says what functions do; None unless that is certain.

    It is certain of a function whose defaults, attributes, closure and globals are plain values, numpy arrays, names
    of installed packages, or functions of which it is certain. An installed package counts by its version. It is not
    of a module of the user's, an import in the function, any other object, or what reads files or the environment.
    """
    digest = hashlib.sha256(sys.version.encode())

    def add(part: str | bytes) -> None:
        encoded = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little") + encoded)

    try:
        _add(add, value, {})
    except Exception:  # what is not certain, a list in itself, a variable without a value, a property of the user's
        return None
    return digest.hexdigest()


_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes, range)
_READ_ELSEWHERE = {"os", "posix", "sys", "io", "_io", "pathlib", "importlib"}
_READ_ELSEWHERE |= {f"builtins.{name}" for name in ("__import__", "eval", "exec", "globals", "vars")}


def _add(add: Callable[[str | bytes], None], value: Any, seen: dict[int, int]) -> None:
    """Add what tells ``value`` from others; raises an exception where that is not certain.

    ``seen``: the number of each function that was added, by its id.
    """
    kind = type(value)  # a subclass of the user's may do anything
    add(f"{kind.__module__}.{kind.__qualname__}")
    if kind in _PLAIN or isinstance(value, np.dtype):
        add(repr(value))
    elif isinstance(value, np.generic) or kind is np.ndarray:
        if value.dtype.hasobject:
            raise TypeError("an array of objects")
        add(repr((value.dtype, value.shape)))
        add(value.tobytes())
    elif kind in (tuple, list):
        add(str(len(value)))
        for item in value:
            _add(add, item, seen)
    elif kind is dict:
        _add(add, [*value.items()], seen)
    elif kind in (set, frozenset) and all(type(item) in _PLAIN for item in value):
        add(repr(sorted(map(repr, value))))
    elif kind is CodeType:
        names = (value.co_name, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
        add(repr((names, counts, value.co_code, getattr(value, "co_exceptiontable", b""))))
        _add(add, value.co_consts, seen)
    elif kind is functools.partial:
        _add(add, (value.func, value.args, value.keywords), seen)
    elif (name := _installed_name(value)) is not None:
        add(name)
    elif kind is FunctionType and id(value) in seen:
        add(str(seen[id(value)]))
    elif kind is FunctionType:
        seen[id(value)] = len(seen)
        _add(add, (*_seen_by(value), value.__dict__, _globals_of(value)), seen)
    else:
        raise TypeError(f"nobody can tell what {kind} does")


def _globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """The globals and builtins that a function and those in it load; raises TypeError if they import or set one."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
                raise TypeError(f"{instruction.opname} {instruction.argval}")
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(instruction.argval)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    known = {**vars(builtins), **function.__globals__}
    return [(name, known[name]) for name in sorted(names)]


def _installed_name(value: Any) -> str | None:
    """The name and version of an installed module or of what is in it by its name; None: it is neither.

    Raises TypeError where a function could reach files, the environment or other modules by it.
    """
    name: Any = ""
    if isinstance(value, ModuleType):
        module = value
    else:
        found = sys.modules.get(getattr(value, "__module__", None) or "")
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")  # a ufunc has the latter alone
        if found is None or "<" in name or functools.reduce(_attribute, name.split("."), found) is not value:
            return None
        module = found
    package = sys.modules[module.__name__.partition(".")[0]]
    is_standard = package.__name__ in sys.stdlib_module_names and _is_in(package, sysconfig.get_path("stdlib"))
    version: Any = "" if is_standard else getattr(package, "__version__", None)
    if package.__name__ == "__main__" or not isinstance(version, str):
        return None
    if not is_standard and not {"site-packages", "dist-packages"} & set(Path(package.__file__ or "").parts):
        return None
    if {package.__name__, f"{module.__name__}.{name}"} & _READ_ELSEWHERE:
        raise TypeError(f"{module.__name__} {name} reads what is elsewhere")
    return f"{module.__name__}.{name} {version}"


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name, None)


def _is_in(module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None)  # one that is built in has none
    return file is None or Path(file).is_relative_to(folder)
