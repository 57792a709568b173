"""Catalogue: functions on whole numbers."""

from __future__ import annotations

from sao_core.environments.code_repair.catalogue.draws import word
from sao_core.environments.code_repair.catalogue.entry import Entry


def gcd(a: int, b: int) -> int:
    """Find the greatest common divisor of two numbers of at least 0; gcd(0, 0) is 0.

    >>> gcd(12, 18)
    6
    """
    while b:
        a, b = b, a % b
    return a


def lcm(a: int, b: int) -> int:
    """Find the least common multiple of two numbers of at least 0; it is 0 if one of them is.

    >>> lcm(4, 6)
    12
    """
    if a == 0 or b == 0:
        return 0
    return a // gcd(a, b) * b


def is_prime(n: int) -> bool:
    """Say whether a number is prime; numbers below 2 are not.

    >>> [n for n in range(12) if is_prime(n)]
    [2, 3, 5, 7, 11]
    """
    if n < 2:
        return False
    divisor = 2
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 1
    return True


def primes_up_to(limit: int) -> list[int]:
    """List the primes up to and including the limit.

    >>> primes_up_to(11)
    [2, 3, 5, 7, 11]
    """
    marked = [False] * (limit + 1)
    primes = []
    for n in range(2, limit + 1):
        if marked[n]:
            continue
        primes.append(n)
        for multiple in range(n * n, limit + 1, n):
            marked[multiple] = True
    return primes


def prime_factors(n: int) -> list[int]:
    """List the prime factors of a number of at least 1, the smallest first, each as often as it divides.

    >>> prime_factors(60)
    [2, 2, 3, 5]
    """
    factors = []
    divisor = 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    if n > 1:
        factors.append(n)
    return factors


def digital_root(n: int) -> int:
    """Add up the digits of a number of at least 0, and those of the sum, until one digit is left.

    >>> digital_root(987)
    6
    """
    while n > 9:
        total = 0
        while n > 0:
            total += n % 10
            n //= 10
        n = total
    return n


def to_base(n: int, base: int) -> str:
    """Write a number of at least 0 in a base from 2 to 16, with small letters for the digits above 9.

    >>> to_base(254, 16)
    'fe'
    """
    digits = "0123456789abcdef"
    if n == 0:
        return "0"
    result = ""
    while n > 0:
        result = digits[n % base] + result
        n //= base
    return result


def from_base(text: str, base: int) -> int:
    """Read a number in a base from 2 to 16; digits above 9 are small letters.

    Raises ValueError for a character that is no digit of that base, and for an empty text.

    >>> from_base("fe", 16)
    254
    """
    if not text:
        raise ValueError("no digits")
    value = 0
    for letter in text:
        digit = "0123456789abcdef".find(letter)
        if digit < 0 or digit >= base:
            raise ValueError(f"{letter} is no digit")
        value = value * base + digit
    return value


def to_roman(n: int) -> str:
    """Write a number from 1 to 399 in Roman numerals.

    >>> to_roman(94)
    'XCIV'
    """
    values = [100, 90, 50, 40, 10, 9, 5, 4, 1]
    symbols = ["C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    result = ""
    for value, symbol in zip(values, symbols, strict=True):
        while n >= value:
            result += symbol
            n -= value
    return result


def from_roman(text: str) -> int:
    """Read a Roman numeral: a symbol before a larger one counts negative.

    >>> from_roman("XCIV")
    94
    """
    values = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}
    total = 0
    for index, symbol in enumerate(text):
        value = values[symbol]
        if index + 1 < len(text) and value < values[text[index + 1]]:
            total -= value
        else:
            total += value
    return total


def clamp(value: int, low: int, high: int) -> int:
    """Bring a value into the range from low to high, both included. Raises ValueError if low is above high.

    >>> clamp(12, 0, 10)
    10
    """
    if low > high:
        raise ValueError("low is above high")
    if value < low:
        return low
    if value > high:
        return high
    return value


def integer_root(n: int) -> int:
    """Find the largest whole number whose square is not above n, which is at least 0.

    >>> integer_root(17)
    4
    """
    low, high = 0, n + 1
    while high - low > 1:
        middle = (low + high) // 2
        if middle * middle <= n:
            low = middle
        else:
            high = middle
    return low


def fibonacci(n: int) -> int:
    """Find the Fibonacci number at place n ≥ 0, where the first two are 0 and 1.

    >>> [fibonacci(n) for n in range(8)]
    [0, 1, 1, 2, 3, 5, 8, 13]
    """
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def collatz_steps(n: int) -> int:
    """Count the steps from a number of at least 1 down to 1: an even one is halved, an odd one tripled plus one.

    >>> collatz_steps(6)
    8
    """
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def luhn_valid(number: str) -> bool:
    """Check a card number: from the right every second digit is doubled, less 9 if above 9; the sum must end in 0.

    Spaces do not count; a number with anything else than digits, or without digits, is not valid.

    >>> luhn_valid("4539 1488 0343 6467")
    True
    """
    digits = number.replace(" ", "")
    if not digits.isdigit():
        return False
    total = 0
    for index, digit in enumerate(reversed(digits)):
        value = int(digit)
        if index % 2 == 1:
            value *= 2
            if value > 9:
                value -= 9
        total += value
    return total % 10 == 0


ENTRIES = (
    Entry(gcd, lambda rng: (rng.randint(0, 60), rng.randint(0, 60))),
    Entry(lcm, lambda rng: (rng.randint(0, 12), rng.randint(0, 12)), (gcd,)),
    Entry(
        is_prime, lambda rng: (rng.choice((rng.randint(-2, 12), rng.randint(2, 200), rng.choice((25, 49, 121, 169)))),)
    ),
    Entry(primes_up_to, lambda rng: (rng.randint(0, 60),)),
    Entry(prime_factors, lambda rng: (rng.choice((rng.randint(1, 20), rng.randint(1, 200), rng.randint(2, 12) ** 2)),)),
    Entry(digital_root, lambda rng: (rng.randint(0, 3000),)),
    Entry(
        to_base, lambda rng: (rng.choice((0, rng.randint(0, 20), rng.randint(0, 400))), rng.choice((2, 3, 8, 10, 16)))
    ),
    Entry(
        from_base, lambda rng: (word(rng, "0123af", 3, 0) + rng.choice(("", "", "1")), rng.choice((2, 4, 8, 10, 16)))
    ),
    Entry(to_roman, lambda rng: (rng.randint(1, 399),)),
    Entry(from_roman, lambda rng: (to_roman(rng.randint(1, 399)),)),
    Entry(clamp, lambda rng: (rng.randint(-6, 12), rng.randint(-3, 5), rng.randint(1, 9))),
    Entry(integer_root, lambda rng: (rng.choice((rng.randint(0, 12), rng.randint(0, 12) ** 2, rng.randint(0, 200))),)),
    Entry(fibonacci, lambda rng: (rng.randint(0, rng.choice((5, 50))),)),
    Entry(collatz_steps, lambda rng: (rng.randint(1, rng.choice((9, 90))),)),
    Entry(
        luhn_valid,
        lambda rng: (
            rng.choice(
                (
                    rng.choice(("18", "26", "34", "42", "59", "67", "4242 4242", "7992 7398 713", "a0", "")),
                    word(rng, "0123456789", 6),
                )
            )
            + rng.choice(("", "", " ")),
        ),
    ),
)
