"""Short Python functions with a prompt each. Names of parameters vary; it knows no other
programming language."""

import random

PARAMETERS = {
    "A": ("a", "x", "first", "left"),
    "B": ("b", "y", "second", "right"),
    "N": ("n", "number", "x", "value"),
    "L": ("numbers", "values", "items", "data"),
    "S": ("text", "s", "word", "string"),
    "W": ("words", "names", "strings"),
    "D": ("d", "table", "mapping"),
}
# name | what it does | parameters | body (one statement a line, `;` between) | an example
FUNCTIONS = """
add|adds two numbers|A, B|return A + B|add(2, 3)=5
subtract|subtracts the second number from the first|A, B|return A - B|subtract(5, 3)=2
multiply|multiplies two numbers|A, B|return A * B|multiply(4, 3)=12
divide|divides the first number by the second|A, B|return A / B|divide(8, 2)=4.0
square|returns the square of a number|N|return N * N|square(4)=16
cube|returns the cube of a number|N|return N ** 3|cube(2)=8
double|doubles a number|N|return 2 * N|double(6)=12
half|returns half of a number|N|return N / 2|half(10)=5.0
is_even|checks whether a number is even|N|return N % 2 == 0|is_even(4)=True
is_odd|checks whether a number is odd|N|return N % 2 == 1|is_odd(4)=False
is_positive|checks whether a number is positive|N|return N > 0|is_positive(3)=True
is_negative|checks whether a number is negative|N|return N < 0|is_negative(3)=False
maximum|returns the larger of two numbers|A, B|if A > B:;    return A;return B|maximum(3, 7)=7
minimum|returns the smaller of two numbers|A, B|if A < B:;    return A;return B|minimum(3, 7)=3
absolute|returns the absolute value of a number|N|if N < 0:;    return -N;return N|absolute(-5)=5
average|returns the average of a list of numbers|L|return sum(L) / len(L)|average([2, 4])=3.0
total|returns the sum of a list|L|result = 0;for item in L:;    result += item;return result|total([1, 2, 3])=6
product|returns the product of a list|L|result = 1;for item in L:;    result *= item;return result|product([2, 3])=6
largest|returns the largest number of a list|L|result = L[0];for item in L:;    if item > result:;        result = item;return result|largest([3, 9, 4])=9
smallest|returns the smallest number of a list|L|result = L[0];for item in L:;    if item < result:;        result = item;return result|smallest([3, 9, 4])=3
count_even|counts the even numbers in a list|L|count = 0;for item in L:;    if item % 2 == 0:;        count += 1;return count|count_even([1, 2, 4])=2
count_odd|counts the odd numbers in a list|L|count = 0;for item in L:;    if item % 2 == 1:;        count += 1;return count|count_odd([1, 2, 4])=1
even_numbers|returns the even numbers of a list|L|return [item for item in L if item % 2 == 0]|even_numbers([1, 2, 4])=[2, 4]
odd_numbers|returns the odd numbers of a list|L|return [item for item in L if item % 2 == 1]|odd_numbers([1, 2, 3])=[1, 3]
positive_numbers|returns the positive numbers of a list|L|return [item for item in L if item > 0]|positive_numbers([-1, 2])=[2]
squares|returns the squares of a list of numbers|L|return [item * item for item in L]|squares([1, 2, 3])=[1, 4, 9]
doubles|doubles every number of a list|L|return [2 * item for item in L]|doubles([1, 2])=[2, 4]
first|returns the first element of a list|L|return L[0]|first([5, 6])=5
last|returns the last element of a list|L|return L[-1]|last([5, 6])=6
length|returns the length of a list|L|return len(L)|length([1, 2])=2
reverse_list|reverses a list|L|return L[::-1]|reverse_list([1, 2])=[2, 1]
sort_list|sorts a list|L|return sorted(L)|sort_list([3, 1])=[1, 3]
sort_down|sorts a list from large to small|L|return sorted(L, reverse=True)|sort_down([1, 3])=[3, 1]
unique|removes duplicates from a list|L|result = [];for item in L:;    if item not in result:;        result.append(item);return result|unique([1, 1, 2])=[1, 2]
contains|checks whether a list contains a number|L, N|return N in L|contains([1, 2], 2)=True
count_item|counts how often a number is in a list|L, N|count = 0;for item in L:;    if item == N:;        count += 1;return count|count_item([1, 1], 1)=2
is_empty|checks whether a list is empty|L|return len(L) == 0|is_empty([])=True
reverse|reverses a string|S|return S[::-1]|reverse("abc")="cba"
upper|turns a string into capital letters|S|return S.upper()|upper("abc")="ABC"
lower|turns a string into small letters|S|return S.lower()|lower("ABC")="abc"
is_palindrome|checks whether a string is a palindrome|S|return S == S[::-1]|is_palindrome("anna")=True
count_vowels|counts the vowels in a string|S|count = 0;for letter in S:;    if letter in "aeiou":;        count += 1;return count|count_vowels("banana")=3
count_words|counts the words in a string|S|return len(S.split())|count_words("one two")=2
first_letter|returns the first letter of a string|S|return S[0]|first_letter("cat")="c"
last_letter|returns the last letter of a string|S|return S[-1]|last_letter("cat")="t"
repeat|repeats a string a number of times|S, N|return S * N|repeat("ab", 2)="abab"
join_words|joins a list of words with spaces|W|return " ".join(W)|join_words(["a", "b"])="a b"
longest_word|returns the longest word of a list|W|return max(W, key=len)|longest_word(["a", "bb"])="bb"
shortest_word|returns the shortest word of a list|W|return min(W, key=len)|shortest_word(["a", "bb"])="a"
lengths|returns the lengths of a list of words|W|return [len(word) for word in W]|lengths(["a", "bb"])=[1, 2]
capitalize_all|capitalizes every word of a list|W|return [word.capitalize() for word in W]|capitalize_all(["tom"])=["Tom"]
greet|greets a person by name|S|return "Hello, " + S + "!"|greet("Ann")="Hello, Ann!"
remove_spaces|removes all spaces from a string|S|return S.replace(" ", "")|remove_spaces("a b")="ab"
starts_with_a|checks whether a string starts with the letter a|S|return S.startswith("a")|starts_with_a("ant")=True
factorial|returns the factorial of a number|N|result = 1;for i in range(1, N + 1):;    result *= i;return result|factorial(4)=24
sum_to|adds all numbers from 1 to a number|N|result = 0;for i in range(1, N + 1):;    result += i;return result|sum_to(4)=10
count_down|returns a list that counts down to 1|N|return list(range(N, 0, -1))|count_down(3)=[3, 2, 1]
count_up|returns a list that counts up from 1|N|return list(range(1, N + 1))|count_up(3)=[1, 2, 3]
is_prime|checks whether a number is prime|N|if N < 2:;    return False;for i in range(2, N):;    if N % i == 0:;        return False;return True|is_prime(7)=True
fibonacci|returns the first Fibonacci numbers|N|result = [0, 1];while len(result) < N:;    result.append(result[-1] + result[-2]);return result[:N]|fibonacci(5)=[0, 1, 1, 2, 3]
power|raises the first number to the power of the second|A, B|return A ** B|power(2, 3)=8
remainder|returns the remainder of a division|A, B|return A % B|remainder(7, 3)=1
is_divisible|checks whether the first number is divisible by the second|A, B|return A % B == 0|is_divisible(6, 3)=True
rectangle_area|returns the area of a rectangle|A, B|return A * B|rectangle_area(2, 3)=6
perimeter|returns the perimeter of a rectangle|A, B|return 2 * (A + B)|perimeter(2, 3)=10
circle_area|returns the area of a circle|N|return 3.14159 * N * N|circle_area(1)=3.14159
to_fahrenheit|converts degrees Celsius to Fahrenheit|N|return N * 9 / 5 + 32|to_fahrenheit(100)=212.0
to_celsius|converts degrees Fahrenheit to Celsius|N|return (N - 32) * 5 / 9|to_celsius(32)=0.0
minutes|converts hours to minutes|N|return N * 60|minutes(2)=120
digits|returns the sum of the digits of a number|N|return sum(int(digit) for digit in str(N))|digits(123)=6
swap|swaps two values|A, B|return B, A|swap(1, 2)=(2, 1)
same|checks whether two values are equal|A, B|return A == B|same(1, 1)=True
keys|returns the keys of a dictionary|D|return list(D.keys())|keys({"a": 1})=["a"]
merge|joins two lists|A, B|return A + B|merge([1], [2])=[1, 2]
every_second|returns every second element of a list|L|return L[::2]|every_second([1, 2, 3])=[1, 3]
sign|returns 1, 0 or -1 for the sign of a number|N|if N > 0:;    return 1;if N < 0:;    return -1;return 0|sign(-3)=-1
""".strip().split("\n")
WITH_NUMBER = """
add_K|adds K to a number|N|return N + K
minus_K|subtracts K from a number|N|return N - K
times_K|multiplies a number by K|N|return N * K
divisible_by_K|checks whether a number is divisible by K|N|return N % K == 0
larger_than_K|returns the numbers of a list that are larger than K|L|return [item for item in L if item > K]
smaller_than_K|returns the numbers of a list that are smaller than K|L|return [item for item in L if item < K]
add_K_to_all|adds K to every number of a list|L|return [item + K for item in L]
all_times_K|multiplies every number of a list by K|L|return [item * K for item in L]
first_K|returns the first K elements of a list|L|return L[:K]
last_K|returns the last K elements of a list|L|return L[-K:]
is_above_K|checks whether a number is larger than K|N|return N > K
count_above_K|counts the numbers of a list that are larger than K|L|count = 0;for item in L:;    if item > K:;        count += 1;return count
longer_than_K|returns the words that have more than K letters|W|return [word for word in W if len(word) > K]
repeat_K|repeats a string K times|S|return S * K
divided_by_K|divides a number by K|N|return N / K
remainder_by_K|returns the remainder of a number divided by K|N|return N % K
""".strip().split("\n")
ASKS = (
    "Write a Python function that {w}.",
    "Write a function that {w}.",
    "Write a short Python function that {w}.",
    "Can you write a Python function that {w}?",
    "I need a Python function that {w}.",
    "Write a function called {n} that {w}.",
    "Write a Python function {n} that {w}.",
    "Please write a function which {w}.",
    "Show me a Python function that {w}.",
    "Give me a function that {w}.",
)


def third_to_plain(what: str) -> str:
    """`adds two numbers` -> `Add two numbers.`"""
    verb, rest = what.split(" ", 1)
    plain = {
        "divides": "divide",
        "doubles": "double",
        "reverses": "reverse",
        "removes": "remove",
        "capitalizes": "capitalize",
        "raises": "raise",
        "multiplies": "multiply",
    }.get(verb, verb.removesuffix("s"))
    return f"{plain.capitalize()} {rest}."


def function(rng: random.Random) -> tuple[str, str]:
    """A prompt and its function, or a head with a docstring and its body."""
    if rng.random() < 0.3:
        name, what, parameters, body = (
            rng.choice(WITH_NUMBER).replace("K", str(rng.randint(2, 20))).split("|")
        )
        example = ""
    else:
        name, what, parameters, body, example = rng.choice(FUNCTIONS).split("|")
    chosen: dict[str, str] = {}
    for key in parameters.split(", "):
        chosen[key] = rng.choice(PARAMETERS[key])
    if set(parameters.split(", ")) == {"A", "B"}:
        i = (
            rng.randrange(3)
            if name in {"maximum", "minimum", "power", "remainder"}
            else rng.randrange(4)
        )
        chosen = {"A": PARAMETERS["A"][i], "B": PARAMETERS["B"][i]}
    if chosen.get("N") == chosen.get("S"):
        chosen["N"] = "n"
    lines = [" " + line for line in body.split(";")]
    text = "\n".join("   " + rename(line, chosen) for line in lines)
    head = f"def {name}({rename(parameters, chosen)}):"
    doc = f'    """{third_to_plain(what)}"""'
    call, _, result = example.partition("=")
    if rng.random() < 0.28:
        with_example = bool(example) and rng.random() < 0.5
        shown = (
            f'    """{third_to_plain(what)}\n\n    >>> {call}\n    {result}\n    """'
            if with_example
            else doc
        )
        return rng.choice(
            (
                "Complete the Python function.",
                "Write the body of this function.",
                "Complete this function.",
                "Finish the Python code.",
            )
        ) + f"\n\n{head}\n{shown}", text
    answer = head + "\n" + (doc + "\n" if rng.random() < 0.4 else "") + text
    if example and rng.random() < 0.3:
        answer += f"\n\nprint({call})  # {result}"
    return rng.choice(ASKS).format(w=what, n=name), answer


def rename(code: str, chosen: dict[str, str]) -> str:
    """Put the parameter names in place of the capital letters that stand for them."""
    out, word = [], ""
    for c in code + " ":
        if c.isalnum() or c == "_":
            word += c
        else:
            out.append(chosen.get(word, word) + c)
            word = ""
    return "".join(out)[:-1]
