# ruff: noqa: SIM905
"""Everyday facts as tables and the questions asked about them. It knows the facts, not how long an
answer should be."""

import random

from demo_recipe.grammar import articles, in_order, listing, say, sentences

OPPOSITES = (
    """big small|hot cold|fast slow|happy sad|up down|day night|old young|light heavy|hard soft|wet dry|open closed|full empty|high low
rich poor
strong weak|loud quiet|early late|clean dirty|near far|thick thin|long short|wide narrow|sweet sour|left right|begin end|push pull
give take|buy sell
win lose|laugh cry|love hate|inside outside|first last|black white|brave afraid|good bad|true false|friend enemy|summer winter
north south|east west
easy difficult|cheap expensive|sharp blunt|deep shallow|smooth rough|polite rude|safe dangerous|awake asleep|remember forget|arrive leave
lazy busy
accept refuse|bright dark|front back|above below|before after|always never|everything nothing|question answer|simple complicated
tight loose
""".strip()
    .replace("\n", "|")
    .split("|")
)
PLURALS = (
    """child children|mouse mice|foot feet|tooth teeth|goose geese|man men|woman women|person people|leaf leaves|knife knives|wolf wolves
sheep sheep
fish fish|box boxes|bus buses|city cities|baby babies|berry berries|dish dishes|fox foxes|potato potatoes|tomato tomatoes|watch watches
story stories
cat cats|book books|tree trees|half halves|life lives|shelf shelves|lady ladies|party parties|hero heroes|deer deer|ox oxen|loaf loaves
toy toys|key keys
""".strip()
    .replace("\n", "|")
    .split("|")
)
PAST = (
    """go went|eat ate|see saw|run ran|write wrote|sing sang|buy bought|think thought|come came|take took|give gave|swim swam|drink drank
fly flew
drive drove|sleep slept|make made|find found|begin began|break broke|speak spoke|teach taught|catch caught|sit sat|stand stood|know knew
grow grew
walk walked|play played|jump jumped|tell told|say said|feel felt|keep kept|lose lost|win won|send sent|wear wore|bring brought
choose chose
""".strip()
    .replace("\n", "|")
    .split("|")
)
# animal: sound, young, home, food, legs, group, one more sentence
ANIMALS: dict[str, tuple[str, str, str, str, str, str, str]] = {
    "dog": (
        "barks",
        "puppy",
        "in a house or a kennel",
        "meat and dog food",
        "four",
        "mammal",
        "Dogs can smell much better than people.",
    ),
    "cat": (
        "meows",
        "kitten",
        "in a house",
        "meat and fish",
        "four",
        "mammal",
        "Cats sleep for many hours a day.",
    ),
    "cow": ("moos", "calf", "on a farm", "grass and hay", "four", "mammal", "Cows give us milk."),
    "horse": (
        "neighs",
        "foal",
        "in a stable",
        "grass, hay and oats",
        "four",
        "mammal",
        "Horses can sleep while they are standing.",
    ),
    "sheep": ("bleats", "lamb", "on a farm", "grass", "four", "mammal", "Sheep give us wool."),
    "pig": (
        "grunts",
        "piglet",
        "in a sty",
        "roots, corn and vegetables",
        "four",
        "mammal",
        "Pigs are very clever animals.",
    ),
    "duck": (
        "quacks",
        "duckling",
        "on a pond",
        "plants, seeds and small insects",
        "two",
        "bird",
        "Ducks have feathers that keep out the water.",
    ),
    "hen": ("clucks", "chick", "in a henhouse", "grain and worms", "two", "bird", "Hens lay eggs."),
    "lion": (
        "roars",
        "cub",
        "in the grasslands of Africa",
        "meat",
        "four",
        "mammal",
        "A group of lions is called a pride.",
    ),
    "tiger": (
        "roars",
        "cub",
        "in the forests of Asia",
        "meat",
        "four",
        "mammal",
        "Every tiger has its own pattern of stripes.",
    ),
    "bear": (
        "growls",
        "cub",
        "in forests and mountains",
        "berries, fish and honey",
        "four",
        "mammal",
        "Many bears sleep through the winter.",
    ),
    "wolf": (
        "howls",
        "pup",
        "in forests",
        "meat",
        "four",
        "mammal",
        "Wolves live in groups called packs.",
    ),
    "fox": (
        "barks",
        "cub",
        "in a den",
        "mice, birds and berries",
        "four",
        "mammal",
        "Foxes hunt mostly at night.",
    ),
    "rabbit": (
        "squeaks",
        "kit",
        "in a burrow",
        "grass and leaves",
        "four",
        "mammal",
        "Rabbits have long ears that help them hear danger.",
    ),
    "mouse": (
        "squeaks",
        "pup",
        "in a small nest",
        "seeds and grain",
        "four",
        "mammal",
        "Mice can pass through very small holes.",
    ),
    "elephant": (
        "trumpets",
        "calf",
        "in Africa and Asia",
        "grass, leaves and fruit",
        "four",
        "mammal",
        "The elephant is the largest land animal.",
    ),
    "monkey": (
        "chatters",
        "infant",
        "in trees in warm forests",
        "fruit, leaves and insects",
        "four",
        "mammal",
        "Monkeys use their tails for balance.",
    ),
    "giraffe": (
        "hums",
        "calf",
        "in the grasslands of Africa",
        "leaves from tall trees",
        "four",
        "mammal",
        "The giraffe is the tallest animal on land.",
    ),
    "kangaroo": (
        "grunts",
        "joey",
        "in Australia",
        "grass and leaves",
        "four",
        "mammal",
        "A kangaroo carries its young in a pouch.",
    ),
    "penguin": (
        "honks",
        "chick",
        "in the cold south",
        "fish",
        "two",
        "bird",
        "Penguins cannot fly, but they swim very well.",
    ),
    "owl": (
        "hoots",
        "owlet",
        "in trees and old barns",
        "mice",
        "two",
        "bird",
        "Owls hunt at night and can turn their heads very far.",
    ),
    "frog": (
        "croaks",
        "tadpole",
        "near ponds",
        "insects",
        "four",
        "amphibian",
        "Frogs begin their life in the water.",
    ),
    "bee": (
        "buzzes",
        "larva",
        "in a hive",
        "nectar and pollen",
        "six",
        "insect",
        "Bees make honey.",
    ),
    "ant": (
        "makes almost no sound",
        "larva",
        "in an anthill",
        "seeds, sugar and small insects",
        "six",
        "insect",
        "An ant can carry much more than its own weight.",
    ),
    "spider": (
        "makes almost no sound",
        "spiderling",
        "in a web",
        "insects",
        "eight",
        "arachnid",
        "Spiders spin webs to catch insects.",
    ),
    "shark": (
        "makes no sound",
        "pup",
        "in the sea",
        "fish and seals",
        "no",
        "fish",
        "Sharks lose and grow many teeth in their lives.",
    ),
    "whale": (
        "sings",
        "calf",
        "in the sea",
        "small fish and krill",
        "no",
        "mammal",
        "The blue whale is the largest animal of all.",
    ),
    "dolphin": (
        "clicks and whistles",
        "calf",
        "in the sea",
        "fish",
        "no",
        "mammal",
        "Dolphins must come up to breathe air.",
    ),
    "snake": (
        "hisses",
        "snakelet",
        "in forests, deserts and fields",
        "mice and other small animals",
        "no",
        "reptile",
        "Snakes shed their skin as they grow.",
    ),
    "turtle": (
        "hisses",
        "hatchling",
        "near water",
        "plants and small fish",
        "four",
        "reptile",
        "A turtle carries its house on its back.",
    ),
    "crow": (
        "caws",
        "chick",
        "in trees",
        "seeds, insects and scraps",
        "two",
        "bird",
        "Crows are very clever birds.",
    ),
    "goat": (
        "bleats",
        "kid",
        "on a farm or in the mountains",
        "grass and leaves",
        "four",
        "mammal",
        "Goats are good at climbing.",
    ),
    "eagle": (
        "screams",
        "eaglet",
        "in a nest high up",
        "fish and small animals",
        "two",
        "bird",
        "Eagles can see a mouse from far away.",
    ),
    "swan": (
        "hisses",
        "cygnet",
        "on lakes and rivers",
        "water plants",
        "two",
        "bird",
        "Swans often stay together for life.",
    ),
    "goose": (
        "honks",
        "gosling",
        "near lakes",
        "grass and grain",
        "two",
        "bird",
        "Geese fly in the shape of the letter V.",
    ),
    "butterfly": (
        "makes no sound",
        "caterpillar",
        "in meadows and gardens",
        "nectar",
        "six",
        "insect",
        "A butterfly begins its life as a caterpillar.",
    ),
    "squirrel": (
        "chatters",
        "kit",
        "in trees",
        "nuts and seeds",
        "four",
        "mammal",
        "Squirrels hide nuts for the winter.",
    ),
    "hedgehog": (
        "snuffles",
        "hoglet",
        "in gardens and hedges",
        "worms, snails and insects",
        "four",
        "mammal",
        "A hedgehog rolls into a ball when it is afraid.",
    ),
    "bat": (
        "squeaks",
        "pup",
        "in caves and old houses",
        "insects and fruit",
        "two",
        "mammal",
        "Bats find their way in the dark by sound.",
    ),
    "camel": (
        "grunts",
        "calf",
        "in the desert",
        "dry grass and thorny plants",
        "four",
        "mammal",
        "Camels can go without water for many days.",
    ),
}
CAPITALS = (
    """France Paris|Italy Rome|Spain Madrid|Germany Berlin|England London|Japan Tokyo|China Beijing|India New Delhi|Egypt Cairo
Greece Athens
Portugal Lisbon|Austria Vienna|Norway Oslo|Sweden Stockholm|Finland Helsinki|Denmark Copenhagen|Ireland Dublin|Poland Warsaw
Hungary Budapest
Russia Moscow|Turkey Ankara|Kenya Nairobi|Canada Ottawa|Mexico Mexico City|Brazil Brasilia|Argentina Buenos Aires|Peru Lima
Chile Santiago|Cuba Havana
Australia Canberra|Belgium Brussels|Thailand Bangkok|Vietnam Hanoi|Iceland Reykjavik|Ghana Accra|Nepal Kathmandu|Scotland Edinburgh
Romania Bucharest
""".strip()
    .replace("\n", "|")
    .split("|")
)
MONTHS = (
    "January February March April May June July August September October November December".split()
)
LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
COLOUR_OF = (
    """the sky:blue|grass:green|snow:white|coal:black|a lemon:yellow|a ripe banana:yellow|blood:red|a carrot:orange|milk:white
the sea:blue
a ripe tomato:red|chocolate:brown|an elephant:grey|a frog:green|the sun in the evening:red or orange|a strawberry:red|a cucumber:green
a plum:purple
a fire engine:red|an orange:orange|a crow:black|a leaf in summer:green|a swan:white|salt:white|a flamingo:pink|honey:golden
a pumpkin:orange|a pea:green
""".strip()
    .replace("\n", "|")
    .split("|")
)
MIXES = (
    "red and yellow:orange|blue and yellow:green|red and blue:purple|red and "
    "white:pink|black and white:grey|red and green:brown"
).split("|")
DEFINITIONS = (
    """library:a place where you can read and borrow books|hospital:a place where sick people are cared for
bakery:a shop where bread and cakes are made and sold
island:a piece of land with water all around it|desert:a very dry place where little rain falls
volcano:a mountain that can throw out hot melted rock
compass:a tool that shows which way is north|umbrella:a thing that you hold over your head to stay dry in the rain
dentist:a doctor who takes care of teeth
thermometer:a tool that measures how hot or cold something is|calendar:a list of the days, weeks and months of a year
recipe:a text that tells you how to cook something
neighbour:a person who lives near you|orchestra:a large group of people who play music together
museum:a building where interesting and old things are shown
rainbow:a curved band of colours that appears in the sky when the sun shines through rain
bridge:a structure that lets people cross a river or a road
map:a drawing that shows where places are|telescope:a tool that makes things far away look closer
microscope:a tool that makes very small things look bigger
farmer:a person who grows plants and keeps animals for food|pilot:a person who flies an aeroplane|author:a person who writes books
planet:a large round body that moves around a star
river:a large stream of water that flows to a lake or to the sea|forest:a large area with many trees
vegetable:a part of a plant that is eaten as food
mirror:a piece of glass in which you can see yourself|clock:a device that shows the time|dictionary:a book that explains what words mean
holiday:a day or a time when people do not work
glacier:a large mass of ice that moves very slowly|habit:something that you do often, almost without thinking
shadow:a dark shape that appears where light is blocked
algorithm:a list of steps for solving a problem|computer:a machine that stores and works with information
password:a secret word that lets you into a place or a program
promise:a statement that you will surely do something|courage:the strength to do something even when you are afraid
patience:the ability to wait calmly
friendship:a bond between people who like and help each other|budget:a plan for how to spend money|triangle:a shape with three sides
square:a shape with four equal sides
circle:a round shape on which every point is equally far from the middle|harvest:the time when ripe crops are gathered
lighthouse:a tower with a bright light that guides ships
blizzard:a storm with strong wind and much snow|echo:a sound that comes back to you from a wall or a mountain
fossil:the remains of a plant or an animal that lived very long ago
gravity:the force that pulls things down to the ground|vitamin:something in food that the body needs to stay healthy
nest:a home that a bird builds for its eggs
""".strip()
    .replace("\n", "|")
    .split("|")
)
MADE_OF = (
    """bread:flour, water and yeast|cheese:milk|butter:cream|paper:wood|glass:sand|a window:glass|chocolate:cocoa beans|wine:grapes
jam:fruit and sugar|a sweater:wool
ice:frozen water|a candle:wax|a tyre:rubber|a book:paper|an omelette:eggs|pancakes:flour, milk and eggs|a snowman:snow
lemonade:lemons, water and sugar|a brick:clay|honey:nectar
""".strip()
    .replace("\n", "|")
    .split("|")
)
JOBS = (
    """teacher:teaches children at school|doctor:helps sick people|baker:bakes bread and cakes|farmer:grows food and looks after animals
pilot:flies aeroplanes
firefighter:puts out fires and saves people|gardener:looks after plants|tailor:makes and mends clothes|carpenter:makes things out of wood
plumber:repairs water pipes
librarian:looks after books and helps people find them|vet:takes care of sick animals|chef:cooks meals in a restaurant
nurse:cares for sick people|painter:paints walls or pictures
fisherman:catches fish|postman:brings letters and parcels|shoemaker:makes and repairs shoes|miner:digs for coal or metal under the ground
journalist:writes about the news
astronaut:travels into space|dentist:looks after teeth|mechanic:repairs cars and machines|musician:plays music|writer:writes books
judge:decides in a court
""".strip()
    .replace("\n", "|")
    .split("|")
)
USED_FOR = (
    """a hammer:to drive nails into wood|a broom:to sweep the floor|a spoon:to eat soup|a key:to open a lock
scissors:to cut paper and cloth|a pencil:to write and draw
a ladder:to reach high places|a fridge:to keep food cold|an oven:to bake food|a lamp:to give light|a towel:to dry yourself
soap:to wash your hands|a ruler:to measure how long something is
a needle:to sew clothes|a bucket:to carry water|a shovel:to dig holes|a map:to find the way|a clock:to tell the time
a bicycle:to ride from place to place|a phone:to talk to people far away
a tent:to sleep outdoors|a helmet:to protect your head|glasses:to see better|a pillow:to rest your head on
an umbrella:to stay dry in the rain|a camera:to take pictures
""".strip()
    .replace("\n", "|")
    .split("|")
)
LISTS: dict[str, str] = {
    "fruits": "apples bananas oranges pears grapes cherries peaches plums lemons melons kiwis "
    "mangoes strawberries pineapples",
    "vegetables": "carrots potatoes peas onions cabbage beans spinach cucumbers peppers "
    "broccoli pumpkins leeks",
    "animals": "dogs cats horses cows lions tigers rabbits foxes elephants bears mice wolves "
    "monkeys",
    "farm animals": "cows pigs sheep goats hens ducks horses geese donkeys",
    "wild animals": "lions tigers elephants wolves bears zebras giraffes foxes monkeys deer",
    "birds": "owls eagles sparrows robins crows ducks swans penguins parrots pigeons geese",
    "insects": "ants bees butterflies beetles flies mosquitoes wasps crickets moths ladybirds",
    "sea animals": "whales dolphins sharks octopuses crabs seals turtles jellyfish starfish",
    "pets": "dogs cats hamsters rabbits goldfish parrots mice canaries",
    "colours": "red blue green yellow orange purple brown black white pink grey",
    "sports": "football tennis swimming basketball running cycling volleyball hockey skiing "
    "judo golf",
    "drinks": "water milk tea coffee juice lemonade cocoa",
    "flowers": "roses tulips daisies lilies sunflowers violets daffodils poppies orchids",
    "trees": "oak pine maple birch willow beech ash cherry palm",
    "tools": "hammer saw drill screwdriver pliers spade rake axe ruler",
    "musical instruments": "piano guitar violin flute drum trumpet harp cello clarinet organ",
    "clothes": "shirts trousers socks shoes hats coats gloves scarves skirts sweaters jackets",
    "kinds of weather": "sun rain snow wind fog hail thunder storms frost",
    "school subjects": "maths history music art science geography English biology",
    "countries": "France Italy Japan Brazil Egypt Canada India Mexico Spain Kenya Norway Greece",
    "cities": "Paris London Tokyo Rome Cairo Madrid Berlin Sydney Moscow Vienna Dublin",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "things in a kitchen": "oven fridge pan pot spoon plate cup knife bowl kettle",
    "things in a classroom": "desks chairs books pencils chalk paper maps rulers",
    "body parts": "head arm leg hand foot ear eye nose mouth knee shoulder",
    "feelings": "joy sadness anger fear love surprise pride hope shame",
    "vehicles": "cars buses trains bicycles ships aeroplanes trucks trams boats",
    "shapes": "circle square triangle rectangle star oval hexagon",
    "desserts": "cake pudding pie cookies jelly pancakes muffins custard",
    "hobbies": "reading painting singing cooking dancing gardening hiking knitting fishing drawing",
    "programming languages": "Python Java Ruby Rust JavaScript Go Swift Kotlin",
    "rooms in a house": "kitchen bedroom bathroom cellar attic hall pantry study",
}


def animal(rng: random.Random) -> tuple[str, str]:
    """A question about an animal."""
    name, (sound, young, home, food, legs, group, more) = rng.choice(list(ANIMALS.items()))
    s = {
        "n": name,
        "sound": sound,
        "young": young,
        "home": home,
        "food": food,
        "legs": legs,
        "group": group,
        "more": more,
    }
    plural = {
        "mouse": "mice",
        "wolf": "wolves",
        "goose": "geese",
        "sheep": "sheep",
        "fox": "foxes",
        "butterfly": "butterflies",
    }.get(name, name + "s")
    s["ns"] = plural
    ask, answer = rng.choice(
        (
            ("what [sound|noise] does a {n} make?", "a {n} {sound}."),
            ("what is a [baby {n}|young {n}] called?", "a [baby|young] {n} is called a {young}."),
            ("what do you call a [young|baby] {n}?", "a [baby|young] {n} is called a {young}."),
            ("where [do {ns}|does a {n}] live?", "[{ns} live|a {n} lives] {home}."),
            ("what [do {ns}|does a {n}] eat?", "[{ns} eat|a {n} eats] {food}."),
            ("how many legs does a {n} have?", "a {n} has {legs} legs."),
            (
                "[is a {n} a mammal, a bird or something else|what kind of animal is a {n}]?",
                "a {n} is a {group}.",
            ),
            (
                "[tell me something about|what do you know about|tell me about|describe] {ns}.",
                "[a {n} is a {group}. it lives {home} and eats {food}. {more}|"
                "{ns} live {home}. they eat {food}. a young {n} is called a {young}. {more}|"
                "a {n} is a {group} that lives {home}. {more}]",
            ),
            ("tell me a fact about {ns}.", "{more}"),
            ("give me an interesting fact about {ns}.", "[here is one: {more}|{more}]"),
        )
    )
    if rng.random() < 0.3 and "{more}" not in answer:
        answer += " {more}"
    return say(ask, s, rng), say(answer, s, rng)


def word(rng: random.Random) -> tuple[str, str]:
    """Opposites, plurals, past tenses, definitions, letters."""
    form = rng.randrange(6)
    if form == 0:
        a, b = rng.choice(OPPOSITES).split()
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        s = {"a": a, "b": b}
        return say(
            "[what is the opposite of {a}?|the opposite of {a} is what?|"
            'which word means the opposite of {a}?|tell me the opposite of "{a}".|'
            'give me the opposite of {a}.|what is the opposite of "{a}"?]',
            s,
            rng,
        ), say('[the opposite of {a} is {b}.|the opposite of "{a}" is "{b}".]', s, rng)
    if form == 1:
        a, b = rng.choice(PLURALS).split()
        return say(
            '[what is the plural of {a}?|give me the plural of "{a}".|how do you write more '
            "than one {a}?]",
            {"a": a},
            rng,
        ), say(
            '[the plural of {a} is {b}.|the plural of "{a}" is "{b}".|one {a}, two {b}.]',
            {"a": a, "b": b},
            rng,
        )
    if form == 2:
        a, b = rng.choice(PAST).split()
        return say('what is the past tense of [{a}|"{a}"|the verb "{a}"]?', {"a": a}, rng), say(
            '[the past tense of {a} is {b}.|the past tense of "{a}" is "{b}".|it is {b}: today '
            "I {a}, yesterday I {b}.]",
            {"a": a, "b": b},
            rng,
        )
    if form in (3, 4):
        a, b = rng.choice(DEFINITIONS).split(":")
        bare = a in {"patience", "courage", "friendship", "gravity"}
        s = {"a": a, "an": a if bare else "a " + a, "b": b}
        return say(
            '[what is {an}?|what does the word "{a}" mean?|explain the word "{a}".|define '
            "{a}.|can you explain what {an} is?|what does {a} mean?]",
            s,
            rng,
        ), say("{an} is {b}.", s, rng)
    a = rng.choice(DEFINITIONS).split(":")[0] if rng.random() < 0.3 else rng.choice(list(ANIMALS))
    pick = rng.randrange(3)
    if pick == 0:
        return (
            f'How many letters does the word "{a}" have?',
            f'The word "{a}" has {len(a)} letters.',
        )
    if pick == 1:
        return (
            f'What is the first letter of "{a}"?',
            f'The first letter of "{a}" is {a[0].upper()}.',
        )
    return f'Spell the word "{a}".', "-".join(a.upper())


def world(rng: random.Random) -> tuple[str, str]:
    """Capitals, months, days, colours, what things are made of and used for, jobs."""
    form = rng.randrange(8)
    if form == 0:
        country, capital = rng.choice(CAPITALS).split(" ", 1)
        s = {"a": country, "b": capital}
        return say(
            "[what is the capital of {a}?|which city is the capital of {a}?|name the capital "
            "of {a}.|what is the capital city of {a}?]",
            s,
            rng,
        ), say("[the capital of {a} is {b}.|{b} is the capital of {a}.]", s, rng)
    if form == 1:
        i = rng.randrange(12)
        m, before, after = MONTHS[i], MONTHS[i - 1], MONTHS[(i + 1) % 12]
        season = (
            "winter",
            "winter",
            "spring",
            "spring",
            "spring",
            "summer",
            "summer",
            "summer",
            "autumn",
            "autumn",
            "autumn",
            "winter",
        )[i]
        s = {"m": m, "p": before, "n": after, "d": str(LENGTHS[i]), "s": season}
        a, b = rng.choice(
            (
                ("[which|what] month comes after {m}?", "{n} comes after {m}."),
                ("[which|what] month comes before {m}?", "{p} comes before {m}."),
                ("how many days does {m} have?", "{m} has {d} days."),
                ("in which season is {m}?", "in the north, {m} is in {s}."),
            )
        )
        return (
            say(a, s, rng),
            say(b, s, rng)
            if m != "February" or "days" not in a
            else "February has 28 days, and 29 days in a leap year.",
        )
    if form == 2:
        i = rng.randrange(7)
        s = {"m": DAYS[i], "p": DAYS[i - 1], "n": DAYS[(i + 1) % 7]}
        a, b = rng.choice(
            (
                ("[which|what] day comes after {m}?", "{n} comes after {m}."),
                ("[which|what] day comes before {m}?", "{p} comes before {m}."),
                ("if today is {m}, what day is tomorrow?", "if today is {m}, tomorrow is {n}."),
                ("if today is {m}, what day was yesterday?", "if today is {m}, yesterday was {p}."),
            )
        )
        return say(a, s, rng), say(b, s, rng)
    if form == 3:
        a, b = rng.choice(COLOUR_OF).split(":")
        verb = "are" if a.endswith("glasses") else "is"
        return say(
            "[what colour {is} {a}?|which colour does {a} have?|tell me the colour of {a}.]",
            {"a": a, "is": verb},
            rng,
        ), say("{a} is {b}.", {"a": a, "b": b}, rng)
    if form == 4:
        a, b = rng.choice(MIXES).split(":")
        return say(
            "[what colour do you get if you mix {a}?|what do {a} make?|mix {a}. what colour is "
            "it?]",
            {"a": a},
            rng,
        ), say("[{a} make {b}.|if you mix {a}, you get {b}.]", {"a": a, "b": b}, rng)
    if form == 5:
        a, b = rng.choice(MADE_OF).split(":")
        verb = "are" if a == "pancakes" else "is"
        return say("what {is} {a} made [of|from]?", {"a": a, "is": verb}, rng), say(
            "{a} {is} made from {b}.", {"a": a, "b": b, "is": verb}, rng
        )
    if form == 6:
        a, b = rng.choice(JOBS).split(":")
        return say(
            "[what does a {a} do?|what is the job of a {a}?|what is a {a}?]", {"a": a}, rng
        ), say("a {a} [|is a person who ]{b}.", {"a": a, "b": b}, rng)
    a, b = rng.choice(USED_FOR).split(":")
    plural = a in {"scissors", "glasses"}
    return say(
        (
            "[what are {a} for?|what do you use {a} for?]"
            if plural
            else "[what is {a} for?|what do you use {a} for?|what do we need {a} for?]"
        ),
        {"a": a},
        rng,
    ), say(
        "[you use {a} {b}.|{a} {is} used {b}.|people use {a} {b}.]",
        {"a": a, "b": b, "is": "are" if plural else "is"},
        rng,
    )


def items(rng: random.Random) -> tuple[str, str]:
    """A list of a given length."""
    topic, line = rng.choice(list(LISTS.items()))
    stock = line.split()
    n = rng.randint(2, min(6, len(stock)))
    picked = in_order(stock, n, rng)
    s = {"n": NUMBERS[n - 1] if rng.random() < 0.85 else str(n), "t": topic, "l": listing(picked)}
    prompt = say("[name|list|give me|tell me|write down|can you name|I need] {n} {t}.", s, rng)
    prompt = prompt[:-1] + "?" if prompt.startswith("Can") else prompt
    form = rng.random()
    if form < 0.4:
        return prompt, "\n".join(f"{i}. {w[0].upper() + w[1:]}" for i, w in enumerate(picked, 1))
    if form < 0.6:
        return prompt, "\n".join(f"- {w[0].upper() + w[1:]}" for w in picked)
    return prompt, say("[{l}.|here are {n} {t}: {l}.|{n} {t} are {l}.]", s, rng)


def odd_one(rng: random.Random) -> tuple[str, str]:
    """Return a question about which word does not belong, and its answer with the kind of the
    others."""
    (topic, line), (other, line2) = rng.sample(
        [(t, v) for t, v in LISTS.items() if " " not in t], 2
    )
    three = rng.sample(line.split(), 3)
    stranger = rng.choice([w for w in line2.split() if w not in line.split()])
    mixed = [*three, stranger]
    rng.shuffle(mixed)
    s = {"l": listing(mixed), "o": stranger, "t": listing(three), "k": topic, "k2": other}
    return say(
        "[which word does not belong: {l}?|which one is different: {l}?|find the odd one out: "
        "{l}.]",
        s,
        rng,
    ), say(
        "[the odd one out is {o}. the others are {k}.|{o} does not belong, because {t} are {k}.]",
        s,
        rng,
    )


def fact(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    ask, answer = rng.choices((animal, word, world, items, odd_one), (4, 3, 4, 3, 1))[0](rng)
    return sentences(articles(ask)), sentences(articles(answer))
