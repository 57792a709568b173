"""Catalogue: functions that read small formats."""

from __future__ import annotations

from sao_core.environments.code_repair.catalogue.draws import word, words
from sao_core.environments.code_repair.catalogue.entry import Entry


def parse_settings(text: str) -> dict[str, str]:
    """Read settings such as "a=1; b=2". Spaces around keys and values do not count; the last value of a key wins.

    Parts without "=" are left out; a value may hold further "=".

    >>> parse_settings("a = 1; b=x=y; c")
    {'a': '1', 'b': 'x=y'}
    """
    result = {}
    for part in text.split(";"):
        key, equals, value = part.partition("=")
        if equals:
            result[key.strip()] = value.strip()
    return result


def split_csv(line: str) -> list[str]:
    """Split a line at its commas. Commas within double quotes do not count, and the quotes are left out.

    >>> split_csv('a,"b,c",d')
    ['a', 'b,c', 'd']
    """
    fields = []
    field = ""
    quoted = False
    for letter in line:
        if letter == '"':
            quoted = not quoted
        elif letter == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += letter
    fields.append(field)
    return fields


def parse_ranges(text: str) -> list[int]:
    """Read page numbers such as "1-3,7" as a sorted list without repetitions. An empty text has none.

    >>> parse_ranges("7,1-3,2")
    [1, 2, 3, 7]
    """
    pages: set[int] = set()
    if not text:
        return []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash:
            pages.update(range(int(first), int(last) + 1))
        else:
            pages.add(int(first))
    return sorted(pages)


def is_balanced(text: str) -> bool:
    """Say whether all brackets (), [] and {} are closed in the right order. Other characters do not count.

    >>> is_balanced("f(a[1])")
    True
    >>> is_balanced("(]")
    False
    """
    pairs = {")": "(", "]": "[", "}": "{"}
    stack = []
    for letter in text:
        if letter in "([{":
            stack.append(letter)
        elif letter in pairs:
            if not stack or stack[-1] != pairs[letter]:
                return False
            stack.pop()
    return not stack


def evaluate_postfix(tokens: list[str]) -> int:
    """Evaluate whole numbers and the operators + - * that follow their two operands.

    Raises ValueError if an operator lacks operands, or if not exactly one value is left.

    >>> evaluate_postfix(["7", "2", "-", "3", "*"])
    15
    """
    stack: list[int] = []
    for token in tokens:
        if token not in ("+", "-", "*"):
            stack.append(int(token))
            continue
        if len(stack) < 2:
            raise ValueError("an operand is missing")
        right = stack.pop()
        left = stack.pop()
        if token == "+":
            stack.append(left + right)
        elif token == "-":
            stack.append(left - right)
        else:
            stack.append(left * right)
    if len(stack) != 1:
        raise ValueError("not one value")
    return stack[0]


def parse_version(text: str) -> list[int]:
    """Read a version such as "v1.20.3" as numbers; a small v before it does not count.

    >>> parse_version("v1.20.3")
    [1, 20, 3]
    """
    if text.startswith("v"):
        text = text[1:]
    return [int(part) for part in text.split(".")]


def compare_versions(first: str, second: str) -> int:
    """Compare two versions: -1, 0 or 1 as the first is older, the same or newer. A missing part counts as 0.

    >>> compare_versions("1.10", "v1.9")
    1
    >>> compare_versions("2.0", "2")
    0
    """
    left, right = parse_version(first), parse_version(second)
    length = max(len(left), len(right))
    left = left + [0] * (length - len(left))
    right = right + [0] * (length - len(right))
    if left == right:
        return 0
    return -1 if left < right else 1


def parse_query(text: str) -> dict[str, list[str]]:
    """Read a query such as "a=1&b&a=2": each key with all its values in order. A key without "=" has the value "".

    Parts without a key are left out.

    >>> parse_query("a=1&b&a=2&=3")
    {'a': ['1', '2'], 'b': ['']}
    """
    result: dict[str, list[str]] = {}
    for part in text.split("&"):
        key, _, value = part.partition("=")
        if not key:
            continue
        result.setdefault(key, []).append(value)
    return result


def parse_size(text: str) -> int:
    """Read a size such as "3K" in bytes: K, M and G stand for 1024, 1024² and 1024³. Raises ValueError for others.

    >>> parse_size("2K")
    2048
    """
    powers = {"K": 1, "M": 2, "G": 3}
    unit = text[-1:]
    if unit in powers:
        return int(text[:-1]) * 1024 ** powers[unit]
    return int(text)


def strip_comment(line: str) -> str:
    """Cut a line at the first # that is not within single quotes, and the spaces before it.

    >>> strip_comment("x = '#1'  # the first")
    "x = '#1'"
    """
    quoted = False
    for index, letter in enumerate(line):
        if letter == "'":
            quoted = not quoted
        if letter == "#" and not quoted:
            line = line[:index]
            break
    return line.rstrip()


def expand_tabs(text: str, width: int) -> str:
    """Replace each tab by the spaces that lead to the next multiple of the width, at least one.

    >>> expand_tabs("a\\tbc\\td", 4)
    'a   bc  d'
    """
    result = ""
    for letter in text:
        if letter == "\t":
            result += " " * (width - len(result) % width)
        else:
            result += letter
    return result


def fill_template(template: str, values: dict[str, str]) -> str:
    """Replace each {name} by its value. Raises KeyError for a name without a value; a { that is not closed stays.

    >>> fill_template("dear {name}!", {"name": "Ada"})
    'dear Ada!'
    """
    result = ""
    position = 0
    while position < len(template):
        start = template.find("{", position)
        end = template.find("}", start)
        if start < 0 or end < 0:
            break
        result += template[position:start] + values[template[start + 1 : end]]
        position = end + 1
    return result + template[position:]


ENTRIES = (
    Entry(
        parse_settings,
        lambda rng: (
            ";".join(
                rng.choice(("", " "))
                + rng.choice("abc")
                + rng.choice(("=", " = ", ""))
                + rng.choice(("1", "x=y", "2 ", ""))
                for _ in range(rng.randint(0, 4))
            ),
        ),
    ),
    Entry(split_csv, lambda rng: (",".join(rng.choice((w, f'"{w}"', f'"{w},{w}"', "")) for w in words(rng, 4)),)),
    Entry(
        parse_ranges,
        lambda rng: (
            ",".join(
                rng.choice((str(n), f"{n}-{n + rng.randint(0, 3)}"))
                for n in (rng.randint(1, 12) for _ in range(rng.randint(0, 4)))
            ),
        ),
    ),
    Entry(
        is_balanced,
        lambda rng: (
            "".join(rng.choice(("()", "[]", "{}", "(a)", "([])", "{()}")) for _ in range(rng.randint(0, 3)))
            + rng.choice(("", "", "", "(", "]", "(]", ")", "[)]", "x")),
        ),
    ),
    Entry(
        evaluate_postfix,
        lambda rng: (
            rng.choice(
                (
                    [str(rng.randint(0, 9)), str(rng.randint(0, 9)), rng.choice("+-*")],
                    ["7", str(rng.randint(0, 9)), rng.choice("+-*"), str(rng.randint(0, 9)), rng.choice("+-*")],
                    ["2", str(rng.randint(0, 9)), "5", rng.choice("+-*"), rng.choice("+-*")],
                    [str(rng.randint(0, 9))],
                    ["1", "2"],
                    ["3", "+"],
                    [],
                )
            ),
        ),
    ),
    Entry(
        parse_version,
        lambda rng: (rng.choice(("", "v")) + ".".join(str(rng.randint(0, 12)) for _ in range(rng.randint(1, 3))),),
    ),
    Entry(
        compare_versions,
        lambda rng: (
            rng.choice(("", "v")) + rng.choice(("1", "1.0", "1.2", "1.10", "1.2.3", "2", "2.0.0")),
            rng.choice(("", "v")) + rng.choice(("1", "1.0", "1.2", "1.10", "1.2.3", "2", "2.0.0", "1.0.1")),
        ),
        (parse_version,),
    ),
    Entry(
        parse_query,
        lambda rng: (
            "&".join(rng.choice(("a=1", "a=2", "b", "b=", "c=x", "=3", "", "a=x=y")) for _ in range(rng.randint(1, 5))),
        ),
    ),
    Entry(parse_size, lambda rng: (f"{rng.randint(0, 40)}{rng.choice(('', 'K', 'M', 'G', 'k', 'T'))}",)),
    Entry(strip_comment, lambda rng: (word(rng, "ab '# ", 9, 0),)),
    Entry(expand_tabs, lambda rng: (word(rng, "abc\t", 8, 0), rng.randint(1, 5))),
    Entry(
        fill_template,
        lambda rng: (
            "".join(rng.choice(("{a}", "{b}", "x", " ", "{c}", "yz", "}")) for _ in range(rng.randint(0, 5)))
            + rng.choice(("", "", "{")),
            {"a": word(rng), "b": rng.choice(("", "{a}", "B")), **({"c": "C"} if rng.random() < 0.6 else {})},
        ),
    ),
)
