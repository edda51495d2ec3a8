"""Options of settings structs as options of a command, and those of sampling that several commands share."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from msgspec import Struct

from tokenloom.services.runtime.host.options import Option, build, exposed, file_flag, flag, options_of

from .command import LISTS

_WIDEST_METAVAR = 40
"""Characters of the choices that stand beside a flag; more are listed in its description."""

_Settings = TypeVar("_Settings", bound=Struct)
_Command = TypeVar("_Command", bound=Callable[..., None])


def offers(options: Iterable[Option], *, variables: bool = False) -> Callable[[_Command], _Command]:
    """Give a command that takes ``**chosen`` these options, in panels named after their groups.

    ``chosen`` then holds for each option what the user gave: checked text, or True or False for a switch; None if the
    option was not given. ``variables``: options are also read from their environment variables. The values of a list
    that is given more than once are added up.
    """
    options = list(options)
    parameters = [_parameter(option, variables=variables) for option in options]
    lists = {option.name for option in options if option.type is tuple}

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*own, *parameters])  # type: ignore[attr-defined]
        command.__annotations__ |= {each.name: each.annotation for each in parameters}
        setattr(command, LISTS, lists | getattr(command, LISTS, set()))
        return command

    return decorate


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are neither None nor empty lists."""
    return {name: value for name, value in values.items() if value is not None and value != []}


def file_option(help: str) -> Any:
    """Return an option that names a file, or several, which must be there and readable."""
    return typer.Option(help=help, exists=True, dir_okay=False, readable=True)


def engine_options(*names: str) -> list[Option]:
    """Return the options of an engine without a mesh: those with these names, or all."""
    # Imported here for the other commands: it costs time at their start.
    from tokenloom.offline.engine_args import DEFAULTS

    offered = options_of(DEFAULTS)
    return [offered[name] for name in names] or [
        option for option in offered.values() if option.name != "model" and option.group != "KV"
    ]


def parsed(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of engine options as keywords of ``LLM``."""
    offered = {option.name: option for option in engine_options()}
    return {name: offered[name].parse(value) for name, value in given(**chosen).items() if name in offered}


def built(base: _Settings, chosen: Mapping[str, Any]) -> _Settings:
    """Return the settings with the chosen options that are among them. Raises ``ValueError``."""
    return build(base, given(**{name: chosen.get(name) for name in options_of(base)}))


def warn_if_exposed(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Return the value of an option that is a secret; warn if it was given as a flag."""
    name = parameter.name or ""
    source = context.get_parameter_source(name)
    if source is not None and source.name == "COMMANDLINE" and not context.resilient_parsing:
        variables = [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())
        file = file_flag(name, [other.name or "" for other in context.command.params])
        typer.echo(f"Warning: {exposed(flag(name), variables, file)}.", err=True)
    return value


def _parameter(option: Option, *, variables: bool) -> inspect.Parameter:
    default = f" [default: {option.default_text}]" if option.default_text else ""
    choices = "|".join(option.choices)
    listed = f" One of {', '.join(option.choices)}." if len(choices) > _WIDEST_METAVAR else ""
    arguments: dict[str, Any] = {
        "help": option.text + listed + default,
        "rich_help_panel": option.group,
        "envvar": option.variable if variables else None,
        "show_envvar": bool(option.extra.get("secret")),
    }
    if option.extra.get("secret"):
        arguments["callback"] = warn_if_exposed
    flags = [flag(name) for name in option.names]
    annotation: Any = str | None
    if option.type is bool:
        flags, annotation = [f"{flag(option.name)}/{flag(f'no_{option.name}')}"], bool | None
    else:
        arguments |= {"parser": _parser(option), "metavar": f"<{'choice' if listed else choices or option.kind}>"}
    info = typer.Option(*flags, **arguments)
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, info]
    )


def _parser(option: Option) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        try:
            return option.text_of(option.parse(value))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Randomness; 0 always selects the most likely token.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Sample from the most likely tokens that have this share of the probability."),
]
TopK = Annotated[
    int | None, typer.Option(min=-1, help="Sample from this many of the most likely tokens; 0 or -1: all.")
]
SampleSeed = Annotated[int | None, typer.Option("--seed", help="Seed; the same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
