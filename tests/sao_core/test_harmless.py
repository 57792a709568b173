import pytest

from sao_core.environments.harmless import MAX_CHARACTERS, is_harmless


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "-3.5",
        "'abc'",
        "[[1, 2], [-3, (4, 'x')]]",
        "20*(61 - 29) - 28",
        "-5*-3/2 + 1",
        "x**2 + sin(2*x)/3 + C",
        "x**(3/2)",
        "(x + 1)**-2",
        "exp(x)*log(x, 2)",
        "2**x*exp(x**2)",
        "E**(x**2)",
        "sqrt(sin(cos(x)))",
        "9**99",
        "x**(2**-1)",
        "x**(2**(1/2))",
    ],
)
def test_values_and_formulas_are_harmless(text):
    assert is_harmless(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "__import__('os').system('true')",
        "().__class__",
        "x.y",
        "x[0]",
        "print(1)",
        "lambda: 1",
        "(lambda: 1)()",
        "sin(x)(3)",
        "sin(*[1])",
        "sin(x=1)",
        "sin()",
        "[i for i in 'ab']",
        "{1: 2}",
        "f'{x}'",
        "x if x else y",
        "x and y",
        "1 < 2",
        "__name__",
        "(x := 3)",
        "await x",
        "not a formula",
        "x! + print(1)",
        "1; 2",
        "1\n2",
        " 1",
        "5 % 3",
        "5 // 3",
    ],
)
def test_programs_and_prose_are_not(text):
    assert not is_harmless(text)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "(9**99)**99",
        "((x**20)**20)**20",
        "9**(9*9*9*9)",
        "9**(500 + 500 + 1)",
        "9**-(9**9)",
        "9**(1/(1/1000/1000))",
        "9**9.5e99",
        "9**exp(9)",
        "2**((1/2)**(-1000))",
        "2**(0.5**x)",
        "2**" + "9" * 400,
        "exp(exp(exp(exp(9))))",
        "[1]*10",
        "'a'*10",
        "(1, 2)*3",
        "1 + " * (MAX_CHARACTERS // 4) + "1",
        "(" * 900 + "1" + ")" * 900,
        "9" * 4400,
    ],
)
def test_what_would_take_long_or_much_memory_is_not(text):
    assert not is_harmless(text)
