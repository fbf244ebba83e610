"""Writes the files of a game of twenty questions: a table of things and what is true of them, and a row for each game.

The things and their properties stand here; nothing is drawn by chance. Every fourth thing is held out.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent

PROPERTIES = {
    "alive": "alive, living, a living thing, a creature",
    "animal": "an animal",
    "mammal": "a mammal",
    "bird": "a bird",
    "plant": "a plant",
    "flies": "fly, able to fly, flying",
    "swims": "swim, in water, in the water, in the sea, able to swim",
    "legs": "legs, four legs, feet",
    "fur": "fur, furry, hair",
    "pet": "a pet, kept as a pet, at home with people",
    "farm": "on a farm, a farm animal",
    "wild": "wild, in the wild, in the jungle, in the forest",
    "eaten": "eat it, eaten, edible, food, eat this",
    "sweet": "sweet, taste sweet",
    "fruit": "a fruit",
    "vegetable": "a vegetable",
    "large": "large, big, huge, bigger than a person, larger than a person, heavier than a person",
    "small": "small, tiny, fit in a hand, fit in my hand, hold it in one hand",
    "made": "made by people, man-made, manmade, artificial, made in a factory",
    "metal": "metal, made of metal, metallic",
    "wood": "wood, wooden, made of wood",
    "wheels": "wheels, a wheel",
    "vehicle": "a vehicle, ride in it, travel in it, transport",
    "tool": "a tool, work with it",
    "furniture": "furniture, a piece of furniture",
    "electric": "electric, electricity, a battery, plugged in",
    "music": "music, an instrument, a musical instrument",
    "clothing": "clothing, wear it, worn",
    "kitchen": "in a kitchen, in the kitchen",
    "red": "red",
    "yellow": "yellow",
    "green": "green",
}  # fmt: skip
"""Name -> the phrases of a question that ask for it."""

THINGS = {
    "cat": "alive animal mammal legs fur pet",
    "dog": "alive animal mammal legs fur pet swims",
    "horse": "alive animal mammal legs fur farm large",
    "cow": "alive animal mammal legs fur farm large eaten",
    "sheep": "alive animal mammal legs fur farm eaten",
    "mouse": "alive animal mammal legs fur wild small",
    "elephant": "alive animal mammal legs wild large",
    "tiger": "alive animal mammal legs fur wild large",
    "whale": "alive animal mammal swims wild large",
    "bat": "alive animal mammal flies fur wild small legs",
    "eagle": "alive animal bird flies wild legs",
    "duck": "alive animal bird flies swims farm eaten legs",
    "penguin": "alive animal bird swims wild legs",
    "parrot": "alive animal bird flies pet small legs green",
    "frog": "alive animal swims wild small legs green",
    "shark": "alive animal swims wild large",
    "bee": "alive animal flies wild small legs yellow",
    "oak": "alive plant wild large wood",
    "rose": "alive plant red small",
    "cactus": "alive plant wild green",
    "apple": "eaten sweet fruit small red plant",
    "banana": "eaten sweet fruit small yellow plant",
    "lemon": "eaten fruit small yellow plant",
    "cherry": "eaten sweet fruit small red plant",
    "tomato": "eaten vegetable small red plant",
    "carrot": "eaten vegetable small plant sweet",
    "cucumber": "eaten vegetable plant green",
    "bread": "eaten made kitchen",
    "cake": "eaten made sweet kitchen",
    "car": "made metal wheels vehicle large",
    "bicycle": "made metal wheels vehicle",
    "train": "made metal wheels vehicle large electric",
    "boat": "made vehicle large swims wood",
    "plane": "made metal wheels vehicle large flies",
    "hammer": "made metal wood tool",
    "saw": "made metal tool",
    "spoon": "made metal kitchen small",
    "fridge": "made metal kitchen electric large",
    "table": "made wood furniture large",
    "chair": "made wood furniture legs",
    "lamp": "made electric furniture",
    "guitar": "made wood music",
    "drum": "made music",
    "piano": "made wood music large furniture",
    "hat": "made clothing",
    "shoe": "made clothing small",
    "phone": "made electric small",
    "pencil": "made wood small tool yellow",
}  # fmt: skip
"""Name -> its properties; of what is not listed the answer is no."""

QUESTION = "I am thinking of a thing. Ask up to 20 questions that I can answer with yes or no, one at a time."


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    properties = {name: phrases.split(", ") for name, phrases in PROPERTIES.items()}
    table = {"properties": properties, "things": {name: words.split() for name, words in THINGS.items()}}
    unknown = {word for words in table["things"].values() for word in words} - set(properties)
    assert not unknown, unknown
    rows = [json.dumps({"prompt": [{"role": "user", "content": QUESTION}], "secret": name}) for name in THINGS]
    return {
        "table.json": json.dumps(table, indent=1) + "\n",
        "train.jsonl": "".join(f"{row}\n" for number, row in enumerate(rows) if number % 4 != 3),
        "held_out.jsonl": "".join(f"{row}\n" for number, row in enumerate(rows) if number % 4 == 3),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} lines")
