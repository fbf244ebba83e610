"""Sixty right answers to questions of mathematics in the forms that chats have, and sixty wrong ones.

Each is a completion and the answer of its row. They were judged by hand.
"""

import pytest

pytest.importorskip("math_verify", reason="needs math-verify: make install EXTRAS=reward")

from sftplay.reward.math_rewards import solves

RIGHT = [
    # a sentence
    ("The answer is 42. I hope this helps!", "42"),
    ("The answer is 42 because 6 * 7 = 42.", "42"),
    ("Answer: $42$ apples", "42"),
    ("therefore 42", "42"),
    ("The answer is minus 3.", "-3"),
    ("The temperature falls to\n\nAnswer: negative 3", "-3"),
    ("**Answer:** 42", "42"),
    ("**The answer is 42.**", "42"),
    ("The final answer is **42**.", "42"),
    ("So the answer to the question is 42!", "42"),
    ("The correct answer is 42, since 6 times 7 is 42.", "42"),
    ("The answer is 42, not 43.", "42"),
    ("The answer is 42; see the steps above.", "42"),
    ("The answer is: 42", "42"),
    ("Final Answer: 42 apples in total", "42"),
    ("42 is the answer.", "42"),
    ("Thus, x = 42.", "42"),
    ("Hence the total is $42.", "42"),
    ("We multiply.\n\n6 * 7 = 42", "42"),
    ("So 6 * 7 = 42.", "42"),
    ("Therefore, the value is 42. Let me know if you have questions!", "42"),
    ("The answer is $x = 42$.", "42"),
    ("The answer is $$42$$", "42"),
    ("The answer is \\(42\\).", "42"),
    ("<answer>42</answer>", "42"),
    ("<think>perhaps 43</think>\nThe answer is 42.", "42"),
    ("The answer is 41. Wait, I forgot one. The answer is 42.", "42"),
    # marks
    ("#### 42", "42"),
    ("6 * 7 is 42.\n#### 42 apples", "42"),
    ("\\boxed{42}", "42"),
    ("First \\boxed{41}, but then \\boxed{42}.", "42"),
    ("The answer is \\boxed{42}. I hope this helps!", "42"),
    ("$\\boxed{x = 42}$", "42"),
    ("\\boxed{\\textbf{42}}", "42"),
    # thousands
    ("\\boxed{1\\,000}", "1000"),
    ("\\boxed{1{,}000}", "1000"),
    ("The answer is 1 000.", "1000"),
    ("The answer is 1,234,567.", "1234567"),
    ("The answer is 12,000 dollars.", "$12,000"),
    ("The answer is 3 million.", "3,000,000"),
    # fractions and powers of ten
    ("The answer is 3/4.", "0.75"),
    ("The answer is \\frac{3}{4}.", "3/4"),
    ("The answer is 3 1/2.", "3.5"),
    ("The answer is 3½ hours.", "3.5"),
    ("\\boxed{-\\frac{3}{4}}", "-0.75"),
    ("The answer is 4.2 × 10^3.", "4200"),
    ("\\boxed{4.2 \\cdot 10^{3}}", "4200"),
    ("The answer is 4.2e3", "4200"),
    ("The answer is 4.2 × 10³.", "4200"),
    # units, per cent, money, times
    ("The answer is 5 m.", "5 meters"),
    ("The answer is 5 km/h.", "5 kilometers per hour"),
    ("The answer is 25 cm².", "25 \\text{ cm}^2"),
    ("The answer is 25 square centimeters.", "25 cm^2"),
    ("The answer is 50 percent.", "50\\%"),
    ("The answer is 0.5.", "50%"),
    ("The answer is €5.", "5 euros"),
    ("The train leaves at\n\nAnswer: 3:30 p.m.", "3:30 PM"),
    ("The angle is\n\\boxed{90^\\circ}", "90"),
    # lists, sets, formulas, words
    ("The answer is 1, 2, 3.", "1,2,3"),
    ("The answer is (1, 2).", "(1,2)"),
    ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}"),
    ("The answer is x = 3 or x = -3.", "-3 or 3"),
    ("\\boxed{[0, 1)}", "[0,1)"),
    ("\\boxed{(x+1)^2}", "x^2 + 2x + 1"),
    ("The answer is 2\\sqrt{2}.", "\\sqrt{8}"),
    ("The answer is (B).", "B"),
    ("The answer is even.", "even"),
]

WRONG = [
    ("", "42"),
    ("I do not know.", "42"),
    ("42 is a number that I like", "42"),
    ("\\boxed{43}", "42"),
    ("The answer is 43.", "42"),
    ("The answer is not 42.", "42"),
    ("The answer isn't 42.", "42"),
    ("The answer is 42. Wait, no, that is not right.", "42"),
    ("The answer is 42. Actually, it is 43.", "42"),
    ("The answer is 42? No, it is 43.", "42"),
    ("The answer is 43, not 42.", "42"),
    ("The answer is 42 or 43.", "42"),
    ("The answer is either 42 or 43.", "42"),
    ("The answer is between 41 and 43.", "42"),
    ("The answer is less than 42.", "42"),
    ("The answer is at least 42.", "42"),
    ("The answer is 42 to 45.", "42"),
    ("If the answer is 42, we are done.", "42"),
    ("Is the answer 42?", "42"),
    ("A wrong answer is 42.", "42"),
    ("I do not think that the answer is 42.", "42"),
    ("The answer is 42 more than 7.", "42"),
    ("The answer is 40 + 2.", "42"),
    ("The answer is 42x.", "42"),
    ("Therefore 2x = 42.", "42"),
    ("Therefore it is not 42.", "42"),
    ("\\boxed{42} and so on; no: \\boxed{43}", "42"),
    ("\\boxed{42}\n\nThe answer is 43.", "42"),
    ("\\boxed{42, 43}", "42"),
    ("\\boxed{42} \\boxed{41}", "42"),
    ("#### 42\n#### 43", "42"),
    ("<think>\\boxed{42}</think>", "42"),
    ("<think>The answer is 42.", "42"),
    ("\\boxed{42", "42"),
    ("\\boxed{-42}", "42"),
    ("The answer is minus 42.", "42"),
    ("The answer is 4.2.", "42"),
    ("The answer is 42 million.", "42"),
    ("The answer is 42 squared.", "42"),
    ("The answer is 42 pi.", "42"),
    ("The answer is 42 below zero.", "42"),
    ("The answer is 42!!", "43"),
    ("5 ms is the answer.", "5 m"),
    ("The answer is 5 ms.", "5 m"),
    ("The answer is 5 mW.", "5 MW"),
    ("The answer is 5 cm.", "5 m"),
    ("The answer is 5 minutes.", "5 hours"),
    ("The answer is 5 m.", "5 m^2"),
    ("The answer is €5.", "$5"),
    ("\\boxed{5\\%}", "5"),
    ("The answer is 5 percent.", "5"),
    ("The answer is 0.5.", "0.5%"),
    ("\\boxed{1,2,3}", "3,2,1"),
    ("The answer is 1, 2.", "1,2,3"),
    ("The answer is (2, 1).", "(1, 2)"),
    ("\\boxed{\\{1,2\\}}", "(1,2)"),
    ("\\boxed{(1,2)}", "\\{1,2\\}"),
    ("\\boxed{[0,1]}", "[0,1)"),
    ("\\boxed{(0,1)}", "[0,1]"),
    ("The answer is 1,23.", "123"),
    ("The answer is 1.234.", "1234"),
    ("The answer is 1 00.", "100"),
    ("\\boxed{0.33}", "1/3"),
    ("The answer is 1 3/4.", "13/4"),
    ("The answer is 3:30 AM.", "3:30 PM"),
    ("\\boxed{3.14159}", "\\pi"),
    ("\\boxed{x > 3}", "x \\ge 3"),
    ("The answer is odd.", "even"),
    ("The answer is (A).", "B"),
    ("The answer is A or B.", "B"),
    ("The answer is 4.2 × 10^2.", "4200"),
]


def paid(form):
    completion, answer = form
    return solves([completion], answer=[answer]) == [1.0]


@pytest.mark.parametrize("form", RIGHT, ids=lambda form: form[0][:40])
def test_a_right_result_is_paid_in_whatever_form_it_is_stated(form):
    assert paid(form)


@pytest.mark.parametrize("form", WRONG, ids=lambda form: form[0][:40])
def test_a_wrong_result_is_paid_in_no_form(form):
    assert not paid(form)


def test_there_are_sixty_forms_of_either_kind():
    assert min(len(set(RIGHT)), len(set(WRONG))) >= 60
