"""Answers of mathematics with known verdicts. Each was judged by hand, not by the code that it tests."""

import pytest

pytest.importorskip("math_verify", reason="needs math-verify: make install EXTRAS=reward")

from sftplay.reward.math_rewards import is_equal, reference_answer, solves

EQUAL = [
    ("1/2", "0.5"), ("\\frac{1}{2}", "0.5"), ("\\frac12", "1/2"), (".5", "1/2"), ("3 1/2", "3.5"),
    ("3 \\frac12", "7/2"), ("-\\frac{1}{2}", "-0.5"), ("1,234", "1234"), ("1\\,234", "1 234"),
    ("12,345,678.5", "12345678.5"), ("−7", "-7"), ("1e3", "1000"), ("1.5 \\times 10^3", "1500"),
    ("2 x 10^{-2}", "0.02"), ("007", "7"), ("$18", "18"), ("\\$18.00", "18"), ("18 dollars", "$18"), ("€5", "5 euros"),
    ("5 cm", "5"), ("12 \\text{ cm}^2", "12"), ("5 hours", "5 hour"), ("90^\\circ", "90"), ("7 km/h", "7"),
    ("50\\%", "0.5"), ("50", "50%"), ("x = 3", "3"), ("$3$", "3"), ("3.", "3"), ("\\text{even}", "even"),
    ("\\left(1,2\\right)", "(1, 2)"), ("[0,1)", "[0, 1)"), ("\\{1,2\\}", "\\{2,1\\}"), ("(x+1)^2", "x^2+2x+1"),
    ("2\\pi r", "2 r \\pi"), ("y=2x+1", "y = 1+2x"), ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"), ("3 or -3", "3 or -3"),
    ("10000", "10,\\!000"), ("11,\\! 111,\\! 100", "11111100"), ("\\frac{2}{-3}", "-\\frac{2}{3}"), ("2,-2", "\\pm2"),
    ("x = \\pm 2", "2 or -2"), ("1+\\sqrt{2}, 1-\\sqrt{2}", "1 \\pm \\sqrt{2}"), ("50%", "50"), ("33.3\\%", "33.3"),
    ("52_8", "52_{8}"), ("1010", "1010_2"), ("1\\le x\\le 2", "[1,2]"), ("2 \\ge t > 1", "(1,2]"),
    ("x \\geq 2", "[2,\\infty)"), ("x < 2", "(-\\infty, 2)"), ("[1,2)", "1 \\leq x < 2"), ("(1,2)", "1<x<2"),
    ("1≤x≤2", "[1,2]"),
]  # fmt: skip

DIFFERENT = [
    ("1\\le x\\le 3", "[1,2]"), ("1<x\\le 2", "[1,2]"), ("x<2", "[2,\\infty)"), ("[1,2]", "1<x<2"),
    ("1<x<2", "(1,2)"),  # which may be a point
    ("1<x<y", "[1,2]"), ("x>1", "[1,2]"), ("[1,2]", "x>2, y<3"), ("1,2", "1\\le x\\le 2"),
    ("\\{1,2\\}", "1\\le x\\le 2"),
    ("0.333", "1/3"), ("1,23", "123"), ("1.234", "1234"), ("-3", "3"), ("3/0", "3"), ("5 cm", "5 m"), ("$5", "5 cm"),
    ("5%", "0.5"), ("5 mW", "5 MW"), ("1e4", "1000"), ("10^{9999}", "5"), ("25+18", "43"), ("\\sqrt{4}", "2"),
    ("2^{10}", "1024"), ("5 or 6", "5"), ("5 to 6", "5"), ("nan", "0"), ("", "3"), ("3", ""), ("18x", "18"),
    ("[0,1)", "[0,1]"), ("\\{1,2,3\\}", "\\{1,2\\}"), ("\\pi", "3.14159"), ("-\\infty", "\\infty"),
    ("\\begin{pmatrix}1\\\\3\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"), ("4:3", "4/3"),
    ("x > 3", "x \\ge 3"), ("1" * 501, "1"), ("{" * 400, "x^2"), ("3 or 4", "3 or -3"), ("1010_2", "1010_3"),
    ("10_2", "10_{16}"), ("10,\\!000", "10"), ("\\frac{2}{-3}", "2/3"), ("2", "\\pm 2"), ("50%", "5"), ("0.5%", "0.5"),
    ("2, 3", "\\pm 2"),
]  # fmt: skip

# A completion and the answer of its row.
RIGHT = [
    ("The answer is 42. I hope this helps!", "42"), ("therefore 42", "42"), ("The answer is minus 3.", "-3"),
    ("The temperature falls to\n\nAnswer: negative 3", "-3"), ("**The answer is 42.**", "42"),
    ("The correct answer is 42, since 6 times 7 is 42.", "42"), ("The answer is 42, not 43.", "42"),
    ("42 is the answer.", "42"), ("Thus, x = 42.", "42"), ("We multiply.\n\n6 * 7 = 42", "42"),
    ("So 6 * 7 = 42.", "42"), ("Therefore, the value is 42. Let me know if you have questions!", "42"),
    ("The answer is $x = 42$.", "42"), ("<answer>42</answer>", "42"),
    ("<think>perhaps 43</think>\nThe answer is 42.", "42"),
    ("The answer is 41. Wait, I forgot one. The answer is 42.", "42"), ("6 * 7 is 42.\n#### 42 apples", "42"),
    ("First \\boxed{41}, but then \\boxed{42}.", "42"), ("$\\boxed{x = 42}$", "42"), ("\\boxed{\\textbf{42}}", "42"),
    ("The answer is 1 000.", "1000"), ("The answer is 3 million.", "3,000,000"), ("The answer is 3½ hours.", "3.5"),
    ("The answer is 4.2 × 10^3.", "4200"), ("The answer is 5 m.", "5 meters"),
    ("The answer is 25 cm².", "25 \\text{ cm}^2"), ("The answer is 25 square centimeters.", "25 cm^2"),
    ("The train leaves at\n\nAnswer: 3:30 p.m.", "3:30 PM"), ("The angle is\n\\boxed{90^\\circ}", "90"),
    ("The answer is 1, 2, 3.", "1,2,3"), ("The answer is x = 3 or x = -3.", "-3 or 3"), ("The answer is (B).", "B"),
]  # fmt: skip

WRONG = [
    ("", "42"), ("I do not know.", "42"), ("The answer is not 42.", "42"),
    ("The answer is 42. Wait, no, that is not right.", "42"), ("The answer is 42. Actually, it is 43.", "42"),
    ("The answer is 42? No, it is 43.", "42"), ("The answer is 43, not 42.", "42"), ("The answer is 42 or 43.", "42"),
    ("The answer is between 41 and 43.", "42"), ("The answer is less than 42.", "42"),
    ("If the answer is 42, we are done.", "42"), ("Is the answer 42?", "42"), ("A wrong answer is 42.", "42"),
    ("I do not think that the answer is 42.", "42"), ("The answer is 42 more than 7.", "42"),
    ("The answer is 42x.", "42"), ("Therefore 2x = 42.", "42"), ("\\boxed{42} and so on; no: \\boxed{43}", "42"),
    ("\\boxed{42}\n\nThe answer is 43.", "42"), ("#### 42\n#### 43", "42"), ("<think>\\boxed{42}</think>", "42"),
    ("\\boxed{42", "42"), ("The answer is minus 42.", "42"), ("The answer is 42 million.", "42"),
    ("The answer is 42 pi.", "42"), ("The answer is 42 below zero.", "42"), ("5 ms is the answer.", "5 m"),
    ("The answer is 5 ms.", "5 m"), ("The answer is 5 m.", "5 m^2"), ("The answer is €5.", "$5"),
    ("\\boxed{1,2,3}", "3,2,1"), ("The answer is (2, 1).", "(1, 2)"), ("\\boxed{\\{1,2\\}}", "(1,2)"),
    ("The answer is 1 00.", "100"), ("The answer is 1 3/4.", "13/4"), ("The answer is 3:30 AM.", "3:30 PM"),
    ("The answer is (A).", "B"),
]  # fmt: skip


def pay(form):
    completion, answer = form
    return solves([completion], answer=[answer])[0]


def test_two_ways_to_write_one_answer_are_equal():
    assert [pair for pair in EQUAL if not is_equal(*pair)] == []


def test_different_answers_are_not_equal():
    assert [pair for pair in DIFFERENT if is_equal(*pair)] == []


def test_a_right_result_is_paid_in_whatever_form_it_is_stated():
    assert [form for form in RIGHT if pay(form) != 1] == []


def test_a_wrong_result_is_paid_in_no_form():
    assert [form for form in WRONG if pay(form) != 0] == []


def test_the_last_number_counts_only_where_that_is_asked_for():
    assert solves(["first 3, then 1,200"], answer=["1200"]) == [0]
    assert solves(["first 3, then 1,200"], answer=["1200"], fallback="last_number") == [1]


def test_a_reference_may_be_a_whole_solution():
    assert reference_answer("9 * 2 = $<<9*2=18>>18 a day\n#### 18") == "18"
    assert reference_answer("so \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
