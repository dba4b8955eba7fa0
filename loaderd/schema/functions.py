"""Whether two functions of a user do the same, although they are two objects, maybe of two programs.

A schema that is made twice by the same program has lambdas that were made twice. They do the same if they have the
same code and see equal values; NaN equals NaN. Functions of which that is not certain count as different.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np


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


def function_key(function: Callable[..., Any]) -> str | None:
    """A digest, in hex, of the function's name, its code, and all that it sees; None where that cannot be told.

    It sees its defaults, its closure, and the globals that it names, and so do functions that it calls. Installed
    packages count by name and version, modules of the user's by their source. Of an object of a class of the user's,
    nobody can tell what it does.
    """
    digest = hashlib.sha256()
    try:
        _add(digest.update, function, set())
    except Exception:  # a property of the user's may raise anything
        return None
    return digest.hexdigest()


def _add(add: Callable[[bytes], object], value: Any, seen: set[int]) -> None:
    """Add what tells ``value`` from others. Raises TypeError where nothing does. ``seen``: the ids of functions."""
    add(f"{type(value).__module__}.{type(value).__qualname__}:".encode())
    if isinstance(value, CodeType):
        add(repr((value.co_name, value.co_code, value.co_names, value.co_argcount, value.co_flags)).encode())
        _add(add, value.co_consts, seen)
    elif value is None or value is Ellipsis or isinstance(value, (bool, int, float, complex, str, bytes, range)):
        add(repr(value).encode(errors="surrogatepass"))
    elif isinstance(value, np.dtype):
        add(repr(value).encode())
    elif isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
        add(repr((value.dtype, value.shape)).encode() + value.tobytes())
    elif isinstance(value, (tuple, list)):
        add(f"{len(value)}".encode())
        for each in value:
            _add(add, each, seen)
    elif isinstance(value, dict):
        _add(add, [*value.items()], seen)
    elif isinstance(value, frozenset) and all(isinstance(each, (str, int)) for each in value):  # of ``in {…}``
        add(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, functools.partial):
        _add(add, (value.func, value.args, value.keywords), seen)
    elif isinstance(value, ModuleType):
        _add_module(add, value)
    elif (package := _installed(getattr(value, "__module__", None))) is not None:
        name = getattr(value, "__qualname__", None) or value.__name__  # a ufunc has the latter alone
        add(f"{value.__module__}.{name}".encode())
        _add_module(add, package)
    elif isinstance(value, MethodType):
        _add(add, (value.__func__, value.__self__), seen)
    elif isinstance(value, FunctionType):
        add(f"{value.__module__}.{value.__qualname__}".encode())
        if id(value) not in seen:
            seen.add(id(value))
            _add(add, (*_seen_by(value), _globals_of(value)), seen)
    elif isinstance(py_func := getattr(value, "py_func", None), FunctionType):  # numba's
        _add(add, py_func, seen)
    else:
        raise TypeError(f"nobody can tell what {value!r:.100} does")


def _globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """The globals that the code of a function names, by name; those of the functions in it, too."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]


def _installed(name: Any) -> ModuleType | None:
    """The package of the module of this name, if it is installed; None: it may change."""
    package = sys.modules.get(name.partition(".")[0]) if isinstance(name, str) else None
    if package is None or package.__name__ == "__main__":
        return None
    file = getattr(package, "__file__", None)
    if package.__name__ in (*sys.builtin_module_names, *sys.stdlib_module_names):
        return package
    is_installed = file is not None and {"site-packages", "dist-packages"} & set(Path(file).parts)
    return package if is_installed else None


def _add_module(add: Callable[[bytes], object], module: ModuleType) -> None:
    add(module.__name__.encode())
    if (package := _installed(module.__name__)) is not None:
        add(f"{getattr(package, '__version__', '')} {sys.version}".encode())
    else:
        add(Path(str(module.__file__)).read_bytes())
