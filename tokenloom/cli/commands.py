"""The commands of a group, each imported when it is used: a command then costs no start time to the others."""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from tokenloom.process.uncollected_imports import uncollected_imports

from .command import Command, CommandGroup, help_page, usage_errors, with_default

_FLAG = "--plugins"
_PLUGINS = "Plugins"
"""The panel of the commands of plugins."""
Places = Mapping[str, tuple[str, ...]]
"""Modules by the panel of the help that shows them. A module's last name is that of its function or ``Typer``, unless
it is given: ``module:function``."""


class PluggedCommands(NamedTuple):
    """The commands of plugins.

    Attributes:
        name: Takes the value of ``--plugins``. Raises ``ValueError``.
        places: Returns where the commands are, as ``module:function``, by name. Raises ``ValueError``.
    """

    name: Callable[[str], None]
    places: Callable[[], Mapping[str, str]]


class LazyCommands(MutableMapping[str, Any]):
    """Holds commands by name; looking one up imports its module."""

    def __init__(self, package: str, places: Places, plugins: PluggedCommands | None = None) -> None:
        """``plugins`` is asked for a name that is not built in, and for all names; None: there are none."""
        self._plugins = plugins
        self._places = {
            _member(module).replace("_", "-"): (f"{package}.{module}", panel)
            for panel, modules in places.items()
            for module in modules
        }
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            place, panel = self._places[name] if name in self._places else (self._plugged()[name], _PLUGINS)
            # Imported when it is used. `tokenloom --help` imported every command and took 1.2 s of CPU; with the texts
            # read from the source it takes 0.1.
            try:
                with uncollected_imports():
                    member = getattr(import_module(_module(place)), _member(place))
            except (Exception, SystemExit) as error:
                if panel != _PLUGINS:
                    raise
                reason = (
                    f"the command {name} of a plugin cannot be loaded from {place}: {type(error).__name__}: {error}"
                )
                raise typer.BadParameter(reason, param_hint=_FLAG) from error
            self._built[name] = _built(member, name, panel)
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError("the commands of the group are fixed")

    def __delitem__(self, name: str) -> None:
        raise TypeError("the commands of the group are fixed")

    def __iter__(self) -> Iterator[str]:
        return iter([*self._places, *self._plugged()])

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._plugged()

    def __len__(self) -> int:
        return len(list(iter(self)))

    def summaries(self) -> Iterator[TyperCommand]:
        """Yield commands with nothing but their help texts, which are read without importing their modules."""
        plugged = {name: (place, _PLUGINS) for name, place in self._plugged().items()}
        for name, (place, panel) in (self._places | plugged).items():
            yield TyperCommand(name, help=_summary(place), rich_help_panel=panel)

    def _plugged(self) -> Mapping[str, str]:
        """Return the commands of plugins. Raises ``typer.BadParameter`` for a package that is not there, and for a name
        that is built in."""
        try:
            found = self._plugins.places() if self._plugins is not None else {}
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--plugins") from None
        if taken := sorted(found.keys() & self._places.keys()):
            raise typer.BadParameter(
                f"a plugin has a command {taken[0]}, which is the name of a built-in one", param_hint="--plugins"
            )
        return found


def lazy_group(package: str, places: Places, plugins: PluggedCommands | None = None) -> type[TyperGroup]:
    """Return a group whose commands are in these modules of a package, and those of ``plugins``."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: Any = LazyCommands(package, places, plugins)

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            # Not an option of typer's, which would import pydantic for its value at every start.
            if plugins is not None and args and args[0].partition("=")[0] == _FLAG:
                args = _named(plugins, args)
            return super().parse_args(ctx, args)

        def list_commands(self, ctx: Any) -> list[str]:
            return list(self.commands)

        def main(
            self,
            args: Sequence[str] | None = None,
            prog_name: str | None = None,
            complete_var: str | None = None,
            standalone_mode: bool = True,
            windows_expand_args: bool = True,
            **extra: Any,
        ) -> Any:
            """Run the command as typer does, but write an error as one line, which scripts and logs can keep."""
            run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
            if not standalone_mode:
                return run()
            with usage_errors():
                status = run()
            sys.exit(status if isinstance(status, int) else 0)

        def get_help_option(self, ctx: Any) -> Any:
            return with_default(super().get_help_option(ctx))

        def format_help(self, ctx: Any, formatter: Any) -> None:
            formatter.write(help_page(self, ctx, self.commands.summaries()))

    return LazyGroup


def _named(plugins: PluggedCommands, args: list[str]) -> list[str]:
    """Take ``--plugins LIST`` from the beginning of a command line; return the rest. Raises ``typer.BadParameter``."""
    flag, equals, value = args[0].partition("=")
    rest = args[1:] if equals else args[2:]
    if not (value := value if equals else "".join(args[1:2])):
        raise typer.BadParameter("needs the names of packages, separated by commas", param_hint=flag)
    try:
        plugins.name(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None
    if rest and rest[0].partition("=")[0] == _FLAG:
        raise typer.BadParameter("is given twice; separate the names by commas", param_hint=flag)
    return rest


def _built(command: Any, name: str, panel: str) -> Any:
    if not isinstance(command, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, cls=Command, rich_help_panel=panel)(command)
        return typer.main.get_command(single)
    if command.registered_commands:  # otherwise it has a lazy group of its own
        command.info.cls = CommandGroup
        for each in command.registered_commands:
            each.cls = Command
    built: Any = typer.main.get_command(command)
    built.name, built.rich_help_panel = name, panel
    return built


def _summary(place: str) -> str:
    """Return the help of a command from the source of its module: its function's docstring, or its ``Typer``'s help."""
    spec, name = find_spec(_module(place)), _member(place)
    if spec is None or spec.origin is None:
        return ""
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n\n")[0]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == name:
            helps = [keyword.value for keyword in node.value.keywords if keyword.arg == "help"]
            return str(ast.literal_eval(helps[0])) if helps else ""
    return ""


def _module(place: str) -> str:
    return place.partition(":")[0]


def _member(place: str) -> str:
    module, _, name = place.partition(":")
    return name or module.rpartition(".")[2]
