"""Modules that a user names on a command line, as MODULE:NAME: they may be in the working directory.

That folder may be shared, and then anybody can leave a module there, under the name of one that Python or a package
imports. So it is in ``sys.path`` only if the module that was named is there, and comes after the folders of all
others.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

from loaderd.errors import OptionError


def add_working_directory(target: str) -> None:
    """Have ``sys.path`` lead to the module of ``target`` if it is in the working directory.

    The folder comes last; or, if an installed module has the same name, right before the folder of that one. Raises
    OptionError for a name of one of Python's own modules.
    """
    package = target.partition(":")[0].partition(".")[0]
    if package in sys.modules and package not in sys.stdlib_module_names:
        return
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it has been deleted
        return
    if here in sys.path or PathFinder.find_spec(package, [here]) is None:
        return
    if package in sys.stdlib_module_names:
        raise OptionError(
            f"{target} names a module of Python's own: {package}, which is imported instead of the one in {here}",
            hint="Give your module another name.",
        )
    others = (place for place, entry in enumerate(sys.path) if PathFinder.find_spec(package, [entry]) is not None)
    sys.path.insert(next(others, len(sys.path)), here)
