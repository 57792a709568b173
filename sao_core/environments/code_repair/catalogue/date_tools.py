"""Catalogue: functions on dates and times of day."""

from __future__ import annotations

import random

from sao_core.environments.code_repair.catalogue.entry import Entry


def is_leap_year(year: int) -> bool:
    """Say whether a year has 366 days: every fourth has, but of the full centuries only every fourth.

    >>> [year for year in (1900, 2000, 2023, 2024) if is_leap_year(year)]
    [2000, 2024]
    """
    if year % 100 == 0:
        return year % 400 == 0
    return year % 4 == 0


def days_in_month(year: int, month: int) -> int:
    """Give the number of days of a month from 1 to 12. Raises ValueError for another one.

    >>> days_in_month(2024, 2)
    29
    """
    if month < 1 or month > 12:
        raise ValueError("no such month")
    if month == 2:
        return 29 if is_leap_year(year) else 28
    if month in (4, 6, 9, 11):
        return 30
    return 31


def day_of_year(year: int, month: int, day: int) -> int:
    """Number a day within its year; the first of January is 1.

    >>> day_of_year(2023, 3, 1)
    60
    """
    total = day
    for earlier in range(1, month):
        total += days_in_month(year, earlier)
    return total


def next_day(year: int, month: int, day: int) -> tuple[int, int, int]:
    """Give the day after as (year, month, day).

    >>> next_day(2023, 12, 31)
    (2024, 1, 1)
    """
    if day < days_in_month(year, month):
        return year, month, day + 1
    if month < 12:
        return year, month + 1, 1
    return year + 1, 1, 1


def add_months(year: int, month: int, day: int, months: int) -> tuple[int, int, int]:
    """Move a date by some months, backwards if negative; a day that the month lacks becomes the month's last.

    >>> add_months(2024, 1, 31, 1)
    (2024, 2, 29)
    """
    index = year * 12 + month - 1 + months
    year, month = index // 12, index % 12 + 1
    return year, month, min(day, days_in_month(year, month))


def days_between(year: int, first: tuple[int, int], second: tuple[int, int]) -> int:
    """Count the days from one (month, day) to another of the same year; negative if the second comes first.

    >>> days_between(2024, (2, 28), (3, 1))
    2
    """
    start = day_of_year(year, first[0], first[1])
    end = day_of_year(year, second[0], second[1])
    return end - start


def weekday(year: int, month: int, day: int) -> str:
    """Name the day of the week, in three letters.

    >>> weekday(2024, 2, 29)
    'Thu'
    """
    names = ["Sat", "Sun", "Mon", "Tue", "Wed", "Thu", "Fri"]
    if month < 3:
        month += 12
        year -= 1
    century, rest = year // 100, year % 100
    number = day + 13 * (month + 1) // 5 + rest + rest // 4 + century // 4 + 5 * century
    return names[number % 7]


def format_duration(seconds: int) -> str:
    """Write a duration as hours, minutes and seconds such as "1h 2m 3s"; parts that are 0 are left out.

    A duration of 0 is "0s".

    >>> format_duration(3723)
    '1h 2m 3s'
    >>> format_duration(120)
    '2m'
    """
    parts = []
    hours, rest = seconds // 3600, seconds % 3600
    if hours > 0:
        parts.append(f"{hours}h")
    minutes, rest = rest // 60, rest % 60
    if minutes > 0:
        parts.append(f"{minutes}m")
    if rest > 0 or not parts:
        parts.append(f"{rest}s")
    return " ".join(parts)


def parse_clock(text: str) -> int:
    """Read a time of day such as "09:30" as minutes since midnight.

    Raises ValueError unless it is hours from 0 to 23, a colon, and minutes from 0 to 59.

    >>> parse_clock("09:30")
    570
    """
    hours, colon, minutes = text.partition(":")
    if not colon or not hours.isdigit() or not minutes.isdigit():
        raise ValueError("not a time of day")
    if int(hours) > 23 or int(minutes) > 59:
        raise ValueError("no such time of day")
    return int(hours) * 60 + int(minutes)


def minutes_between(start: str, end: str) -> int:
    """Count the minutes from one time of day to another; an end before the start is one of the next day.

    >>> minutes_between("23:50", "00:10")
    20
    """
    difference = parse_clock(end) - parse_clock(start)
    if difference < 0:
        difference += 24 * 60
    return difference


def to_twelve_hours(text: str) -> str:
    """Turn a time of day such as "13:05" into "1:05 pm"; midnight is "12:00 am", noon "12:00 pm".

    >>> to_twelve_hours("00:30")
    '12:30 am'
    """
    minutes = parse_clock(text)
    hour = minutes // 60
    half = "am" if hour < 12 else "pm"
    hour = hour % 12
    if hour == 0:
        hour = 12
    return f"{hour}:{minutes % 60:02d} {half}"


def _year(rng: random.Random) -> int:
    return rng.choice((rng.randint(16, 24) * 100, rng.randint(400, 600) * 4, rng.randint(1600, 2400)))


def _date(rng: random.Random) -> tuple[int, int, int]:
    year, month = _year(rng), rng.randint(1, 12)
    return year, month, rng.choice((1, days_in_month(year, month), rng.randint(1, 28)))


def _clock(rng: random.Random) -> str:
    return f"{rng.choice((0, 11, 12, 23, rng.randint(0, 23))):02d}:{rng.choice((0, 59, rng.randint(0, 59))):02d}"


def _bad_clock(rng: random.Random) -> str:
    bad = (f"{rng.randint(24, 30)}:{rng.randint(0, 59)}", f"12:{rng.randint(60, 70)}", "1230", "ab:10", "10:", "7:5")
    return rng.choice(bad) if rng.random() < 0.4 else _clock(rng)


ENTRIES = (
    Entry(is_leap_year, lambda rng: (_year(rng),)),
    Entry(days_in_month, lambda rng: (_year(rng), rng.choice((0, 2, 2, 13, rng.randint(1, 12)))), (is_leap_year,)),
    Entry(day_of_year, _date, (days_in_month, is_leap_year)),
    Entry(next_day, _date, (days_in_month, is_leap_year)),
    Entry(add_months, lambda rng: (*_date(rng), rng.randint(-14, 14)), (days_in_month, is_leap_year)),
    Entry(
        days_between,
        lambda rng: (
            _year(rng),
            _date(rng)[1:] if rng.random() < 0.1 else (rng.randint(1, 12), rng.randint(1, 28)),
            (rng.randint(1, 12), rng.randint(1, 28)),
        ),
        (day_of_year, days_in_month, is_leap_year),
    ),
    Entry(weekday, _date),
    Entry(
        format_duration,
        lambda rng: (rng.choice((0, 1, 59, 60, 61)) + rng.choice((0, 0, 60, 600)) + rng.choice((0, 3600, 7200)),),
    ),
    Entry(parse_clock, lambda rng: (_bad_clock(rng),)),
    Entry(minutes_between, lambda rng: (_clock(rng), _clock(rng)), (parse_clock,)),
    Entry(to_twelve_hours, lambda rng: (_clock(rng),), (parse_clock,)),
)
