# ruff: noqa: SIM905
"""The word lists of the generator: people, animals, things, places, feelings. Nothing here knows
how a sentence is built."""

import random

GIRLS = """
Ada Alma Amy Anna Bella Clara Daisy Dora Edith Ella Emma Etta Fern Flora Freya Gia Grace Hana Hazel Ida Ines Iris Ivy Jana Jane
June Kate Kira Lena Lily Lina Lola Lucy Luna Mara Mary Maya Mia Mila Mina Molly Nadia Nell Nina Nora Olga Olive Pearl Pia Rita
Rosa Rose Ruby Ruth Sally Sara Sofia Stella Suki Tara Tessa Tina Uma Vera Willa Zara Zoe Zuri
""".split()
BOYS = """
Abel Adam Ali Amir Arlo Ben Bo Carl Dan David Eli Emil Erik Felix Finn Fred Gus Hari Hugo Ian Idris Ivan Jack Jake Jay Joe Jon
Juan Karl Ken Kofi Leo Levi Liam Luca Luis Mark Max Milo Musa Nico Noah Oli Omar Oscar Otis Owen Paul Pedro Pete Ravi Rex Rob
Sam Sami Seth Tariq Theo Tim Tom Toby Tomas Umar Victor Will Yusuf Zane
""".split()
PETNAMES = """
Acorn Barley Bean Berry Biscuit Bramble Bubbles Button Chip Clover Cocoa Coco Cookie Copper Cricket Dash Dot Dusty Echo Fluff
Fuzzy Ginger Hoppy Honey Jasper Jumper Kiwi Lemon Maple Marble Minty Misty Mossy Muffin Nibbles Nutmeg Oat Patch Peanut Pebble
Pepper Pickle Pip Pippin Plum Poppy Pudding Puff Quill Rusty Sandy Scout Shadow Skip Smoky Snowy Socks Spark Spot Sprout Squeak
Sunny Tansy Thistle Tiny Toffee Tumble Twig Waffle Whisker Willow Ziggy
""".split()
ANIMALS = """
fox rabbit bear mouse hedgehog squirrel owl duck frog turtle cat dog kitten puppy goat lamb pig horse pony donkey cow hen goose
swan sparrow robin crow parrot penguin seal otter beaver badger mole deer wolf lion tiger elephant monkey giraffe zebra hippo
camel kangaroo koala panda snail ant bee spider butterfly ladybird bat raccoon lizard crab whale dolphin octopus fish dragon
""".split()
PEOPLE = """
girl boy baker farmer teacher doctor fisherman sailor painter gardener king queen prince princess knight shepherd clockmaker
tailor postman cook singer builder carpenter shoemaker librarian
""".split()
FIRST = "B Br D F G H J K Kl L M N P R S St T Tr V W Z".split()
MIDDLE = "a e i o u ae ia".split()
INNER = "b d l m n r s t v nd rt ll nn st".split()
LAST = "a e o i us an en in ik el is".split()
FEMALE = {"girl", "queen", "princess", "cow", "hen"}
MALE = {"boy", "king", "prince", "fisherman", "postman"}
SMALL = (
    "little small young tiny quiet shy clever cheerful curious gentle kind lazy brave "
    "grumpy proud sleepy silly old busy friendly"
).split()
COLOURS = "red blue green yellow white black brown golden silver purple orange pink grey".split()
THINGS = """
hat scarf coat button bell key lamp lantern kite ball drum flute book map boat basket blanket cup spoon ring necklace shell
stone feather ribbon umbrella mitten boot shoe sock bag box clock mirror candle pencil brush whistle wagon bicycle balloon doll
teddy pillow marble coin violin trumpet ladder bucket broom jar bottle chair telescope compass
""".split()
TRAITS = (
    "shiny old new tiny round soft wooden striped lucky favourite pretty warm big small".split()
)
PLACES = """forest|meadow|village|garden|valley|little town|big city|old castle|quiet wood|green field|jungle|swamp|desert|orchard
windmill|lighthouse
harbour|park|cave|small cottage|far country|busy street|tall tower|old barn""".replace(
    "\n", "|"
).split("|")
SPOTS = """under a bush|behind a big rock|in the tall grass|under the bed|on top of a shelf|behind the door|beside the pond
under a pile of leaves
in a hollow log|at the bottom of the basket|on a low branch|near the old well|under the bridge|behind the barn|next to the garden gate
in the kitchen
between two stones|under the stairs|at the edge of the path|in the mud by the river""".replace(
    "\n", "|"
).split("|")
FOODS = """apples|berries|nuts|carrots|bread|cheese|pears|honey cakes|soup|cookies|plums|pancakes|cherries|corn|peas|pies|sandwiches
strawberries|muffins
oranges|bananas|biscuits|cakes|peaches|grapes""".replace("\n", "|").split("|")
FEARS = """the dark|thunder|deep water|high places|loud noises|strangers|the wind|spiders|shadows|the old bridge|big dogs|being alone
snow|storms
the forest at night|singing in front of others|the moon|mice|the cellar|waves""".replace(
    "\n", "|"
).split("|")
SKILLS = """swim|dance|sing|fly a kite|read|ride a bicycle|bake bread|climb trees|whistle|paint|play the flute|skate|juggle|jump high
play the drum
cook|knit|write|build a boat|swing|play chess|count to one hundred|catch a ball|row a boat|tie a knot""".replace(
    "\n", "|"
).split("|")
SIGHTS = """the sea|the highest mountain|the big city|a rainbow|the snow|a waterfall|the northern lights|the oldest tree
the moon from the top of the hill
the stars|the king's castle|a lighthouse|the desert|the wild flowers on the other side of the hill|the end of the river""".replace(
    "\n", "|"
).split("|")
SEEDS = "sunflower|pumpkin|bean|apple|tomato|rose|carrot|cherry|lemon|strawberry|pea|tulip|melon|walnut".split(
    "|"
)
DISHES = (
    "soup|a cake|a pie|pancakes|bread|a stew|biscuits|jam|a pudding|noodles|porridge|a "
    "pizza|a salad"
).split("|")
GAMES = (
    "hide and seek|tag|catch|a counting game|cards|a guessing game|leapfrog|a clapping "
    "game|chess|skipping"
).split("|")


def invented(rng: random.Random) -> str:
    """A name that is in no list, so that a model learns to copy names instead of knowing them."""
    return rng.choice(FIRST) + rng.choice(MIDDLE) + rng.choice(INNER) + rng.choice(LAST)
