"""`lockstep configs`."""

from dataclasses import dataclass

from lockstep.cli.parsing import parse
from lockstep.cli.tables import console, new_table
from lockstep.config.shipped import cannot_be_read, description, find_config, shipped_configs


@dataclass
class ConfigsArguments:
    """List the configs that come with Lockstep; with a name, print that one, to start a file of your own.

    Every command that takes a config takes such a name too, from any folder.

    For example:

    lockstep configs

    lockstep configs digits_cnn > mine.yaml

    lockstep train digits_cnn --nproc 2
    """


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        parse(ConfigsArguments, argv[1:], "configs")
        file = find_config(argv[0])
        if not file.is_file():
            raise cannot_be_read(file, "there is no such config")
        try:
            print(file.read_text(encoding="utf-8"), end="")
        except UnicodeDecodeError:
            raise cannot_be_read(file, "it is not text") from None
        return 0
    parse(ConfigsArguments, argv, "configs")
    table = new_table("", ("name",), (), ("what it is",))
    table.show_edge = False
    for name, file in shipped_configs().items():
        table.add_row(name, description(file).replace("`", ""))
    console().print(table)
    print("lockstep train NAME runs one; lockstep configs NAME prints it, to start a file of your own")
    return 0
