"""Problems with whole-number answers, made from a random generator: arithmetic, number theory, counting, six levels.

Each comes with its answer, by formula, and with a program that finds it by search, as a demonstrator would write it.
Written for this package; nothing is taken from a published set.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

LEVELS = 6


@dataclass(frozen=True)
class Problem:
    """A question, its answer, and Python that prints the answer."""

    question: str
    answer: int
    program: str


def make_problem(rng: random.Random, level: int) -> Problem:
    """A problem of ``level`` 1 (three numbers of one digit) … 6 (counting with conditions)."""
    return rng.choice(_KINDS[level])(rng)


def _three_digits(rng: random.Random) -> Problem:
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    first, second = rng.choice("+-*"), rng.choice("+-*")
    signs = {"+": 1, "-": -1}
    if second == "*":
        answer = a * b * c if first == "*" else a + signs[first] * b * c
    else:
        answer = (a * b if first == "*" else a + signs[first] * b) + signs[second] * c
    expression = f"{a} {first} {b} {second} {c}"
    return Problem(f"What is {expression}?", answer, f"print({expression})")


def _sum_of_products(rng: random.Random) -> Problem:
    a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(11, 999)
    return Problem(f"What is {a} * {b} + {c}?", a * b + c, f"print({a} * {b} + {c})")


def _remainder(rng: random.Random) -> Problem:
    a, b = rng.randint(1000, 99999), rng.randint(7, 97)
    return Problem(f"What is the remainder when {a} is divided by {b}?", a - b * (a // b), f"print({a} % {b})")


def _shopping(rng: random.Random) -> Problem:
    boxes, pens, given = rng.randint(12, 60), rng.randint(12, 48), rng.randint(20, 140)
    return Problem(
        f"A school buys {boxes} boxes of {pens} pens and gives away {given} pens. How many pens are left?",
        boxes * pens - given,
        f"print({boxes} * {pens} - {given})",
    )


def _common_divisor(rng: random.Random) -> Problem:
    shared = rng.randint(6, 90)
    a, b = shared * rng.randint(11, 60), shared * rng.randint(11, 60)
    return Problem(
        f"What is the greatest common divisor of {a} and {b}?",
        math.gcd(a, b),
        f"a, b = {a}, {b}\nwhile b:\n    a, b = b, a % b\nprint(a)",
    )


def _divisors(rng: random.Random) -> Problem:
    exponents = {p: rng.randint(0, 3) for p in (2, 3, 5, 7)}
    exponents[rng.choice((2, 3))] += 1
    n = math.prod(p**e for p, e in exponents.items())
    return Problem(
        f"How many positive divisors does {n} have?",
        math.prod(e + 1 for e in exponents.values()),
        f"n = {n}\nprint(sum(n % d == 0 for d in range(1, n + 1)))",
    )


def _digit_sum(rng: random.Random) -> Problem:
    base, exponent = rng.choice((2, 3, 7, 11)), rng.randint(12, 60)
    return Problem(
        f"What is the sum of the decimal digits of {base}^{exponent}?",
        sum(map(int, str(base**exponent))),
        f"print(sum(int(d) for d in str({base}**{exponent})))",
    )


def _multiples(rng: random.Random) -> Problem:
    a, b = rng.sample((3, 4, 5, 6, 7, 8, 9, 11), 2)
    below = rng.randint(150, 1500)

    def total(step: int) -> int:
        count = (below - 1) // step
        return step * count * (count + 1) // 2

    return Problem(
        f"What is the sum of all positive integers below {below} that are multiples of {a} or of {b}?",
        total(a) + total(b) - total(math.lcm(a, b)),
        f"print(sum(n for n in range(1, {below}) if n % {a} == 0 or n % {b} == 0))",
    )


def _power_remainder(rng: random.Random) -> Problem:
    base, exponent, modulus = rng.randint(3, 40), rng.randint(50, 900), rng.choice((97, 101, 127, 625, 1000, 1001))
    return Problem(
        f"What is the remainder when {base}^{exponent} is divided by {modulus}?",
        pow(base, exponent, modulus),
        f"print({base}**{exponent} % {modulus})",
    )


def _coprime(rng: random.Random) -> Problem:
    n = rng.randint(200, 900)
    primes = rng.sample((2, 3, 5, 7, 11), rng.randint(2, 3))
    signs = product((0, 1), repeat=len(primes))
    count = sum(
        (-1) ** sum(chosen) * (n // math.prod(p for p, on in zip(primes, chosen, strict=True) if on))
        for chosen in signs
    )
    m = math.prod(primes)
    return Problem(
        f"How many of the integers 1, 2, ..., {n} have no common divisor above 1 with {m}?",
        count,
        f"from math import gcd\nprint(sum(gcd(k, {m}) == 1 for k in range(1, {n} + 1)))",
    )


_WORDS = ("BANANA", "LETTER", "PEPPER", "COFFEE", "BALLOON", "SUCCESS", "ADDRESS", "POTATO", "TEETH", "LEVEL", "KAYAK")


def _arrangements(rng: random.Random) -> Problem:
    word = rng.choice(_WORDS)
    first = rng.choice(sorted(set(word)))
    rest = Counter(word)
    rest[first] -= 1
    return Problem(
        f"The letters of {word} are written in all distinct orders. How many of these begin with {first}?",
        math.factorial(len(word) - 1) // math.prod(map(math.factorial, rest.values())),
        f"from itertools import permutations\nprint(sum(p[0] == '{first}' for p in set(permutations('{word}'))))",
    )


def _two_remainders(rng: random.Random) -> Problem:
    p, q = rng.sample((7, 9, 11, 13, 16, 17, 19, 23, 25), 2)
    a, b = rng.randrange(1, p), rng.randrange(1, q)
    x = (a + p * ((b - a) * pow(p, -1, q) % q)) % (p * q)
    return Problem(
        f"What is the smallest positive integer that leaves remainder {a} when divided by {p} "
        f"and remainder {b} when divided by {q}?",
        x,
        f"x = 1\nwhile x % {p} != {a} or x % {q} != {b}:\n    x += 1\nprint(x)",
    )


def _paths(rng: random.Random) -> Problem:
    a, b = rng.randint(4, 9), rng.randint(4, 9)
    c, d = rng.randint(1, a - 1), rng.randint(1, b - 1)
    through = math.comb(c + d, c) * math.comb(a + b - c - d, a - c)
    return Problem(
        f"A path goes from (0,0) to ({a},{b}) in unit steps right or up and must not touch ({c},{d}). "
        f"How many such paths are there?",
        math.comb(a + b, a) - through,
        f"ways = {{(0, 0): 1}}\nfor x in range({a} + 1):\n    for y in range({b} + 1):\n        if x + y:\n"
        f"            ways[x, y] = ways.get((x - 1, y), 0) + ways.get((x, y - 1), 0)\n"
        f"        if (x, y) == ({c}, {d}):\n            ways[x, y] = 0\nprint(ways[{a}, {b}])",
    )


def _prime_sum(rng: random.Random) -> Problem:
    below = rng.randint(60, 900)
    sieve = [True] * below
    for n in range(2, below):
        if sieve[n]:
            sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    return Problem(
        f"What is the sum of all primes below {below}?",
        sum(n for n in range(2, below) if sieve[n]),
        f"print(sum(n for n in range(2, {below}) if all(n % d for d in range(2, int(n**0.5) + 1))))",
    )


def _linear_pairs(rng: random.Random) -> Problem:
    a, b, n = rng.randint(2, 9), rng.randint(2, 9), rng.randint(60, 400)
    return Problem(
        f"How many ordered pairs (x, y) of positive integers satisfy {a}x + {b}y = {n}?",
        sum((n - a * x) % b == 0 for x in range(1, (n - b) // a + 1)),
        f"print(sum({a} * x + {b} * y == {n} for x in range(1, {n}) for y in range(1, {n})))",
    )


def _digit_condition(rng: random.Random) -> Problem:
    length, k = rng.randint(3, 5), rng.choice((7, 8, 9, 11, 13))
    counts = Counter({0: 1})
    for _ in range(length):
        counts = Counter({s: sum(counts[s - d] for d in range(10)) for s in range(9 * length + 1)})
    return Problem(
        f"How many of the integers 1, 2, ..., {10**length - 1} have a digit sum that is divisible by {k}?",
        sum(count for total, count in counts.items() if total % k == 0) - 1,
        f"print(sum(sum(map(int, str(n))) % {k} == 0 for n in range(1, {10**length})))",
    )


def _fixed_points(rng: random.Random) -> Problem:
    n = rng.randint(5, 8)
    k = rng.randint(1, n - 3)
    deranged = [1, 0]
    for m in range(2, n + 1):
        deranged.append((m - 1) * (deranged[m - 1] + deranged[m - 2]))
    return Problem(
        f"How many permutations of 1, 2, ..., {n} leave exactly {k} of the numbers in place?",
        math.comb(n, k) * deranged[n - k],
        f"from itertools import permutations\nn = {n}\n"
        f"print(sum(sum(p[i] == i for i in range(n)) == {k} for p in permutations(range(n))))",
    )


def _subset_sums(rng: random.Random) -> Problem:
    n, m = rng.randint(8, 14), rng.randint(3, 9)
    ways = [1] + [0] * (m - 1)
    for item in range(1, n + 1):
        ways = [ways[r] + ways[(r - item) % m] for r in range(m)]
    return Problem(
        f"How many subsets of {{1, 2, ..., {n}}}, the empty one included, have a sum that is divisible by {m}?",
        ways[0],
        f"n, m, count = {n}, {m}, 0\nfor mask in range(2**n):\n"
        f"    count += sum(i + 1 for i in range(n) if mask >> i & 1) % m == 0\nprint(count)",
    )


def _binary_strings(rng: random.Random) -> Problem:
    n, k = rng.randint(8, 15), rng.randint(2, 4)
    ends = [1] + [0] * (k - 1)  # strings by the number of ones at their end
    for _ in range(n):
        ends = [sum(ends), *ends[:-1]]
    return Problem(
        f"How many strings of {n} zeros and ones do not contain {k} ones in a row?",
        sum(ends),
        f"print(sum('1' * {k} not in format(s, 'b') for s in range(2**{n})))",
    )


def _power_sum(rng: random.Random) -> Problem:
    n, k = rng.randint(40, 400), rng.randint(4, 9)
    return Problem(
        f"What is the remainder when 1^{k} + 2^{k} + ... + {n}^{k} is divided by 1000?",
        sum(pow(i, k, 1000) for i in range(1, n + 1)) % 1000,
        f"print(sum(i**{k} for i in range(1, {n} + 1)) % 1000)",
    )


def _onto(rng: random.Random) -> Problem:
    balls, boxes = rng.randint(5, 7), rng.randint(3, 4)
    return Problem(
        f"In how many ways can {balls} numbered balls be put into {boxes} numbered boxes so that no box is empty?",
        sum((-1) ** j * math.comb(boxes, j) * (boxes - j) ** balls for j in range(boxes + 1)),
        f"from itertools import product\n"
        f"print(sum(len(set(p)) == {boxes} for p in product(range({boxes}), repeat={balls})))",
    )


_KINDS: dict[int, tuple[Callable[[random.Random], Problem], ...]] = {
    1: (_three_digits,),
    2: (_sum_of_products, _remainder, _shopping),
    3: (_common_divisor, _divisors, _digit_sum, _multiples),
    4: (_power_remainder, _coprime, _arrangements, _two_remainders),
    5: (_paths, _prime_sum, _linear_pairs, _digit_condition),
    6: (_fixed_points, _subset_sums, _binary_strings, _power_sum, _onto),
}
