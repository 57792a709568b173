"""Catalogue: functions on matrices and grids."""

from __future__ import annotations

import random

from sao_core.environments.code_repair.catalogue.draws import any_matrix, matrix, square
from sao_core.environments.code_repair.catalogue.entry import Entry


def transpose(rows: list[list[int]]) -> list[list[int]]:
    """Turn rows into columns.

    >>> transpose([[1, 2, 3], [4, 5, 6]])
    [[1, 4], [2, 5], [3, 6]]
    """
    return [[row[column] for row in rows] for column in range(len(rows[0]))]


def multiply(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Multiply two matrices. Raises ValueError if the first has not as many columns as the second has rows.

    >>> multiply([[1, 2], [3, 4]], [[0, 1], [1, 0]])
    [[2, 1], [4, 3]]
    """
    if len(first[0]) != len(second):
        raise ValueError("sizes do not fit")
    result = []
    for row in first:
        line = []
        for column in range(len(second[0])):
            total = 0
            for k in range(len(second)):
                total += row[k] * second[k][column]
            line.append(total)
        result.append(line)
    return result


def rotate_right(rows: list[list[int]]) -> list[list[int]]:
    """Turn a matrix by 90 degrees clockwise.

    >>> rotate_right([[1, 2], [3, 4], [5, 6]])
    [[5, 3, 1], [6, 4, 2]]
    """
    height, width = len(rows), len(rows[0])
    result = []
    for column in range(width):
        result.append([rows[height - 1 - i][column] for i in range(height)])
    return result


def spiral(rows: list[list[int]]) -> list[int]:
    """Read a matrix in a spiral: the top row to the right, the last column down, and so on inwards.

    >>> spiral([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    [1, 2, 3, 6, 9, 8, 7, 4, 5]
    """
    top, bottom, left, right = 0, len(rows) - 1, 0, len(rows[0]) - 1
    result = []
    while top <= bottom and left <= right:
        for column in range(left, right + 1):
            result.append(rows[top][column])
        for row in range(top + 1, bottom + 1):
            result.append(rows[row][right])
        if top < bottom and left < right:
            for column in range(right - 1, left - 1, -1):
                result.append(rows[bottom][column])
            for row in range(bottom - 1, top, -1):
                result.append(rows[row][left])
        top, bottom, left, right = top + 1, bottom - 1, left + 1, right - 1
    return result


def is_symmetric(rows: list[list[int]]) -> bool:
    """Say whether a matrix is square and equals its transpose.

    >>> is_symmetric([[1, 7], [7, 2]])
    True
    """
    size = len(rows)
    if len(rows[0]) != size:
        return False
    for i in range(size):
        for j in range(i):
            if rows[i][j] != rows[j][i]:
                return False
    return True


def minor(rows: list[list[int]], row: int, column: int) -> list[list[int]]:
    """Give a matrix without one row and one column.

    >>> minor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 0, 1)
    [[4, 6], [7, 9]]
    """
    kept = rows[:row] + rows[row + 1 :]
    return [line[:column] + line[column + 1 :] for line in kept]


def determinant(rows: list[list[int]]) -> int:
    """Give the determinant of a square matrix.

    >>> determinant([[1, 2], [3, 4]])
    -2
    """
    if len(rows) == 1:
        return rows[0][0]
    total = 0
    for column, value in enumerate(rows[0]):
        sign = 1 if column % 2 == 0 else -1
        total += sign * value * determinant(minor(rows, 0, column))
    return total


def diagonal_sums(rows: list[list[int]]) -> tuple[int, int]:
    """Add up both diagonals of a square matrix: the one from the top left, then the one from the top right.

    >>> diagonal_sums([[1, 2], [3, 4]])
    (5, 5)
    """
    size = len(rows)
    down, up = 0, 0
    for i in range(size):
        down += rows[i][i]
        up += rows[i][size - 1 - i]
    return down, up


def count_neighbours(grid: list[list[int]], row: int, column: int) -> int:
    """Count the ones among the up to eight cells round a cell of a grid of zeros and ones.

    >>> count_neighbours([[1, 1, 0], [0, 1, 0], [0, 0, 1]], 1, 1)
    3
    """
    count = 0
    for i in range(max(row - 1, 0), min(row + 2, len(grid))):
        for j in range(max(column - 1, 0), min(column + 2, len(grid[0]))):
            if (i, j) != (row, column):
                count += grid[i][j]
    return count


def life_step(grid: list[list[int]]) -> list[list[int]]:
    """Make one step of the game of life: a cell lives on with 2 or 3 neighbours, and one with 3 is born.

    The grid given is not changed.

    >>> life_step([[0, 1, 0], [0, 1, 0], [0, 1, 0]])
    [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
    """
    result = [list(line) for line in grid]
    for i in range(len(grid)):
        for j in range(len(grid[0])):
            neighbours = count_neighbours(grid, i, j)
            if grid[i][j] == 1:
                result[i][j] = 1 if neighbours in (2, 3) else 0
            else:
                result[i][j] = 1 if neighbours == 3 else 0
    return result


def saddle_points(rows: list[list[int]]) -> list[tuple[int, int]]:
    """List the places (row, column) whose value is the largest of its row and the smallest of its column.

    >>> saddle_points([[9, 8, 7], [5, 3, 2], [6, 6, 7]])
    [(1, 0)]
    """
    result = []
    columns = transpose(rows)
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if value == max(row) and value == min(columns[j]):
                result.append((i, j))
    return result


def fill_region(grid: list[list[int]], row: int, column: int, value: int) -> list[list[int]]:
    """Give a grid in which the cell and all equal cells connected with it, side by side, have a new value.

    The grid given is not changed.

    >>> fill_region([[1, 1, 0], [0, 1, 0], [1, 0, 1]], 0, 0, 5)
    [[5, 5, 0], [0, 5, 0], [1, 0, 1]]
    """
    result = [list(line) for line in grid]
    old = grid[row][column]
    if old == value:
        return result
    waiting = [(row, column)]
    while waiting:
        i, j = waiting.pop()
        if i < 0 or j < 0 or i >= len(grid) or j >= len(grid[0]) or result[i][j] != old:
            continue
        result[i][j] = value
        waiting += [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
    return result


def _sizes(rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    inner = rng.randint(1, 3)
    other = inner if rng.random() < 0.8 else rng.randint(1, 3)
    return matrix(rng, rng.randint(1, 3), inner, -2, 3), matrix(rng, other, rng.randint(1, 3), -2, 3)


def _symmetric(rng: random.Random) -> list[list[int]]:
    rows = square(rng, 3)
    for i in range(len(rows)):
        for j in range(i):
            if rng.random() < 0.8:
                rows[i][j] = rows[j][i]
    return rows if rng.random() < 0.8 else any_matrix(rng, 3)


def _bits(rng: random.Random) -> list[list[int]]:
    return matrix(rng, rng.randint(1, 4), rng.randint(1, 4), 0, 1)


def _cell(rng: random.Random) -> tuple[list[list[int]], int, int]:
    grid = _bits(rng)
    return grid, rng.randrange(len(grid)), rng.randrange(len(grid[0]))


ENTRIES = (
    Entry(transpose, lambda rng: (any_matrix(rng),)),
    Entry(multiply, _sizes),
    Entry(rotate_right, lambda rng: (any_matrix(rng),)),
    Entry(spiral, lambda rng: (any_matrix(rng),)),
    Entry(is_symmetric, lambda rng: (_symmetric(rng),)),
    Entry(minor, lambda rng: (matrix(rng, 3, 3), rng.randint(0, 2), rng.randint(0, 2))),
    Entry(determinant, lambda rng: (square(rng, 3),), (minor,)),
    Entry(diagonal_sums, lambda rng: (square(rng),)),
    Entry(count_neighbours, _cell),
    Entry(life_step, lambda rng: (_bits(rng),), (count_neighbours,)),
    Entry(saddle_points, lambda rng: (matrix(rng, rng.randint(1, 3), rng.randint(1, 3), 0, 3),), (transpose,)),
    Entry(fill_region, lambda rng: (*_cell(rng), rng.randint(0, 3))),
)
