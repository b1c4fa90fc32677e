"""Help in two lengths: `--help` shows the common options, in groups; `--help-all` shows all, with
those of `cls=Rare`. Options that several commands have, and the types of their values."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.migration import advice, extra_argument

FEW = 13  # a command with at most this many options shows all of them
HELP_ALL = "--help-all"
NAMES_OF_HELP = ["-h", "--help", HELP_ALL]
"""Help options of groups of commands, whose help has one length."""


class Grouped(click.Option):
    """An option in a named group of the help; `rare` ones are for `--help-all`."""

    def __init__(
        self, *arguments: Any, group: str = "Options", rare: bool = False, **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group
        self.rare = rare


class Rare(Grouped):
    """An option that `--help` leaves to `--help-all`."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, rare=True, **attributes)


class HelpCommand(click.Command):
    """A command that has `--help` and `--help-all`, and a hint for options of other programs."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return [name for name in super().get_help_option_names(ctx) if name != HELP_ALL]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        full = click.Option(
            [HELP_ALL],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show all options and exit.",
        )
        return [*super().get_params(ctx), full]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with hinted(args):
            return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
        shown = options if HELP_ALL in ctx.meta else common(options)
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in shown:
            record = option.get_help_record(ctx)
            if record is not None:
                groups.setdefault(_group(option), []).append(record)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        if len(shown) < len(options):
            formatter.write_paragraph()
            formatter.write_text(
                f"{len(options) - len(shown)} further options: {ctx.command_path} {HELP_ALL}"
            )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text after the options, such as the columns of a table, only in the full
        help."""
        if HELP_ALL in ctx.meta:
            super().format_epilog(ctx, formatter)
        elif self.epilog:
            formatter.write_text(f"The columns of its tables: {ctx.command_path} {HELP_ALL}")


class Commands(click.Group):
    """A group whose error for an unknown command suggests one or lists them all."""

    group_class = type

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with hinted(args):
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        self.check(ctx, args[0])
        return super().resolve_command(ctx, args)

    def check(self, ctx: click.Context, name: str) -> None:
        """`UsageError` if the group has no command of this name."""
        if name not in (names := self.list_commands(ctx)):
            import difflib  # only needed for a command that does not exist

            near = difflib.get_close_matches(name, names, 1)
            whole = f"Choose one of {', '.join(names)}"
            hint = whole if len(names) <= FEW else f"`{ctx.command_path} --help` lists them"
            hint = f"Did you mean {near[0]!r}?" if near else hint
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)


def common(options: Sequence[click.Option]) -> list[click.Option]:
    """Return the options that `--help` shows."""
    if len(options) <= FEW:
        return list(options)
    return [o for o in options if not (isinstance(o, Grouped) and o.rare)]


@contextmanager
def hinted(arguments: Sequence[str]) -> Iterator[None]:
    """Reject an unknown option among `arguments`, naming ours if it belongs to another program;
    reject a model given as an argument, naming its option."""
    given = tuple(arguments)
    try:
        yield
    except click.NoSuchOption as error:
        hint = advice(given, error.option_name)
        if hint is None:
            path = error.ctx.command_path if error.ctx is not None else "dovetail"
            near = f" (did you mean {error.possibilities[0]}?)" if error.possibilities else ""
            hint = f"`{path}` has no option {error.option_name}{near}: `{path} --help` lists them"
        raise click.UsageError(hint, error.ctx) from None
    except click.UsageError as error:
        hint = extra_argument(error.message, error.ctx)
        if hint is None:
            raise
        raise click.UsageError(hint, error.ctx) from None


def _group(option: click.Option) -> str:
    return option.group if isinstance(option, Grouped) else "Options"


def _show_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


FILE = click.Path(dir_okay=False, path_type=Path)  # a file, which may be missing
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)
SEED = click.IntRange(0, (1 << 63) - 1)

Decorator = Callable[[Any], Any]


def option(*names: str, **fields: Any) -> Decorator:
    """Return `click.option` with its default shown, if there is one."""
    return click.option(*names, **{"show_default": "default" in fields, **fields})


def rare(*names: str, **fields: Any) -> Decorator:
    """Return an option that `--help` leaves to `--help-all`."""
    return option(*names, cls=Rare, **fields)


def json_option(text: str = "One JSON object on stdout.") -> Decorator:
    """`--json`, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def json_instead_of(shown: str) -> Decorator:
    """`--json` of a command that shows something else without it."""
    return json_option(f"One JSON object on stdout instead of {shown}.")


def connect_option(
    text: str = "The coordinator.  [default: the only one of this user]", metavar: str = "ADDRESS"
) -> Decorator:
    """`--connect`, None by default."""
    return click.option("--connect", metavar=metavar, help=text)


parent_option = click.option(
    "--parent", type=int, hidden=True, help="End when this process, the parent, ends."
)


def seed_option(text: str) -> Decorator:
    """`--seed`, 0 by default."""
    return rare("--seed", type=SEED, default=0, help=text)


class Number(click.FloatRange):
    """A number in a range; nan is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; `click.BadParameter` for text that is not a number, or out of
        range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number: write digits", param, ctx)
        return number
