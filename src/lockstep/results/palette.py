"""The colours of every chart and page, in light and in dark: one meaning for each, and all can be read (4.5 : 1).

A chart names a colour by its role, as CSS does (`var(--waiting)`). A page defines the roles in its style, so that it
turns dark without drawing anything again; a picture file gets the light ones.
"""

import re

PALETTE: dict[str, tuple[str, str]] = {  # role -> (light, dark)
    "paper": ("#ffffff", "#14181d"),
    "panel": ("#f5f7fa", "#1d232a"),
    "ink": ("#1c2127", "#e7ebf0"),
    "soft": ("#5a6572", "#a3b0be"),
    "line": ("#d8dee6", "#303842"),
    "accent": ("#0b62c4", "#6db3ff"),
    # what time goes to
    "compute": ("#2f66a8", "#7db4f0"),
    "forward": ("#2577ae", "#8fc9ee"),
    "backward": ("#3c5a9a", "#90a8f0"),
    "waiting": ("#c0341d", "#ff8a73"),
    # what memory holds, and what travels
    "parameters": ("#0f7480", "#5fc9d3"),
    "gradients": ("#7248b5", "#bb9cf5"),
    "optimizer": ("#80600a", "#dbb856"),
    "activations": ("#257a3e", "#76cc8e"),
    "other": ("#656d78", "#a9b2bd"),
    # what is compared
    "first": ("#1c2127", "#e7ebf0"),
    "second": ("#b34a00", "#f5a35c"),
    "third": ("#a12a78", "#f08cc8"),
    "fourth": ("#5d6b00", "#b9c93f"),
    "fifth": ("#1b6a5a", "#63c7ae"),
    "sixth": ("#8a4a3c", "#d9a091"),
}
COMPARED = ("first", "second", "third", "fourth", "fifth", "sixth")
DASHES: tuple[list[int], ...] = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [1, 4])
ROLES = {  # series of bars, phases and purposes -> role
    **{"compute": "compute", "ideal": "compute", "forward": "forward", "backward": "backward"},
    **{"exposed communication": "waiting", "exposed": "waiting", "communication": "waiting", "waiting": "waiting"},
    **{"optimizer": "optimizer", "optimizer state": "optimizer", "parameters": "parameters", "gradients": "gradients"},
    **{"activations and temporaries": "activations", "activations": "activations", "memory": "activations"},
    **{"data": "third", "host": "fourth", "load imbalance": "third", "shared cores or GPUs": "fourth"},
    **{"samples": "compute", "tokens": "compute"},
}


def role(name: str) -> str:
    """The colour of what a bar, or a part of it, stands for."""
    return f"var(--{ROLES.get(name, 'other')})"


def distinguished(names: list[str]) -> list[tuple[str, list[int]]]:
    """(colour, dashes) for each of these lines: relatives (bucketed and bucketed+topk) have one colour."""
    families: dict[str, int] = {}
    members: dict[str, int] = {}
    styles = []
    for name in names:
        family = re.split(r"[+@, ]", name)[0]
        number = families.setdefault(family, len(families))
        member = members[family] = members.get(family, -1) + 1
        dash = DASHES[(member + number // len(COMPARED)) % len(DASHES)]
        styles.append((f"var(--{COMPARED[number % len(COMPARED)]})", dash))
    return styles


def style_sheet() -> str:
    """The roles as CSS variables, light and dark."""
    light, dark = ("\n".join(f"  --{name}: {pair[which]};" for name, pair in PALETTE.items()) for which in (0, 1))
    return f":root {{\n{light}\n  color-scheme: light;\n}}\n:root.dark {{\n{dark}\n  color-scheme: dark;\n}}"


def in_light(text: str) -> str:
    """Every role by its light colour."""
    return re.sub(r"var\(--(\w+)\)", lambda found: PALETTE.get(found[1], (found[0],))[0], text)


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it: 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)
