"""Answers of mathematics with known verdicts. Each was judged by hand, not by the code that it tests."""

import pytest

pytest.importorskip("math_verify", reason="needs math-verify: make install EXTRAS=reward")

from sftplay.reward.math_rewards import find_answer, is_equal, last_box, reference_answer, solves

EQUAL = [
    # fractions and decimals
    ("1/2", "0.5"),
    ("\\frac{1}{2}", "0.5"),
    ("\\frac12", "1/2"),
    ("\\dfrac{3}{4}", "0.75"),
    ("\\tfrac{3}{4}", "3/4"),
    (".5", "1/2"),
    ("3 1/2", "3.5"),
    ("3 \\frac12", "7/2"),
    ("2/4", "1/2"),
    ("0.50", "1/2"),
    ("-\\frac{1}{2}", "-0.5"),
    ("3.0", "3"),
    ("6/3", "2"),
    # thousands, signs, powers of ten
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    ("1\\,234", "1 234"),
    ("12,345,678.5", "12345678.5"),
    ("+7", "7"),
    ("\u22127", "-7"),
    ("1e3", "1000"),
    ("1.5 \\times 10^3", "1500"),
    ("2 x 10^{-2}", "0.02"),
    ("007", "7"),
    # money and units
    ("$18", "18"),
    ("\\$18.00", "18"),
    ("18 dollars", "$18"),
    ("18 USD", "$18"),
    ("€5", "5 euros"),
    ("5 cm", "5"),
    ("5", "5 cm"),
    ("12 \\text{ cm}^2", "12"),
    ("5 hours", "5 hour"),
    ("90^\\circ", "90"),
    ("90°", "90"),
    ("60 miles per hour", "60"),
    ("7 km/h", "7"),
    # per cent
    ("50\\%", "0.5"),
    ("0.5", "50%"),
    ("50", "50%"),
    # dress
    ("x = 3", "3"),
    ("$3$", "3"),
    ("\\(3\\)", "3"),
    ("3.", "3"),
    ("**3**", "3"),
    ("\\text{even}", "even"),
    ("\\mathrm{even}", "even"),
    ("\\left(1,2\\right)", "(1, 2)"),
    # intervals, sets, pairs, formulas
    ("[0,1)", "[0, 1)"),
    ("(1,2)", "(1, 2)"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("2\\pi r", "2 r \\pi"),
    ("\\frac{\\sqrt2}{2}", "\\frac{1}{\\sqrt{2}}"),
    ("\\infty", "\\infty"),
    ("y=2x+1", "y = 1+2x"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("A", "A"),
    ("3 or -3", "3 or -3"),
]

DIFFERENT = [
    ("0.333", "1/3"),
    ("1,23", "123"),
    ("1.234", "1234"),
    ("-3", "3"),
    ("18.5", "18"),
    ("3/0", "3"),
    ("0/0", "0"),
    ("1/2", "2"),
    ("5 cm", "5 m"),
    ("5 dollars", "5 euros"),
    ("$5", "5 cm"),
    ("0.5%", "0.5"),
    ("5%", "0.5"),
    ("50%", "50"),
    ("5\\%", "5"),
    ("5 ms", "5 m"),
    ("5 mW", "5 MW"),
    ("1,2,3", "3,2,1"),
    ("1e4", "1000"),
    ("10^{9999}", "5"),
    ("1e9999", "5"),
    ("25+18", "43"),
    ("\\sqrt{4}", "2"),
    ("2^{10}", "1024"),
    ("5 or 6", "5"),
    ("5 and 6", "5"),
    ("5, 6", "5"),
    ("5 6", "5"),
    ("5 not 6", "5"),
    ("5 to 6", "5"),
    ("nan", "0"),
    ("inf", "3"),
    ("", "3"),
    ("3", ""),
    ("18x", "18"),
    ("x", "3"),
    ("[0,1)", "[0,1]"),
    ("(2,1)", "(1,2)"),
    ("\\{1,2,3\\}", "\\{1,2\\}"),
    ("(x+1)^2", "x^2+2x+2"),
    ("\\pi", "3.14159"),
    ("3.14159", "\\pi"),
    ("-\\infty", "\\infty"),
    ("\\begin{pmatrix}1\\\\3\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("4:3", "4/3"),
    ("B", "A"),
    ("even", "odd"),
    ("x > 3", "x \\ge 3"),
    ("1" * 501, "1"),
    ("{" * 400, "x^2"),
    ("3 or 4", "3 or -3"),
]


@pytest.mark.parametrize(("given", "right"), EQUAL)
def test_these_answers_are_equal(given, right):
    assert is_equal(given, right)


@pytest.mark.parametrize(("given", "right"), DIFFERENT)
def test_these_answers_are_not_equal(given, right):
    assert not is_equal(given, right)


def test_a_hundred_pairs_are_judged():
    assert len(EQUAL) + len(DIFFERENT) >= 100


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{never closed", ""),
        ("a #### 3\n#### 4\nmore", "4"),
        ("the answer is 4\nThe final answer is: 5", "5"),
        ("only 5", ""),
    ],
)
def test_the_last_answer_that_is_given_counts(text, answer):
    assert find_answer(text) == answer


def test_the_last_number_counts_only_where_that_is_asked_for():
    assert solves(["first 3, then 1,200"], answer=["1200"]) == [0]
    assert solves(["first 3, then 1,200"], answer=["1200"], fallback="last_number") == [1]


def test_a_reference_may_be_a_whole_solution():
    assert reference_answer("9 * 2 = $<<9*2=18>>18 a day\n#### 18") == "18"
    assert reference_answer("so \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert last_box("\\fbox{7}") == "7"
