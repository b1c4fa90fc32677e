"""Reasons, instructions and tips: short explanations and lists of advice, every sentence with
alternatives."""

import random

from demo_recipe.facts import NUMBERS
from demo_recipe.grammar import in_order, say, sentences

# question after "why": sentences, of which each has alternatives
WHY: dict[str, tuple[str, ...]] = {
    "do birds have feathers": (
        "birds have feathers [to stay warm and to fly|because feathers keep them warm and help "
        "them fly].",
        "[feathers are light and strong|the feathers on the wings push against the air].",
        "[some feathers also keep out the rain|bright feathers also help birds to find a partner].",
    ),
    "do birds sing": (
        "birds sing [to find a partner|to tell other birds where they live].",
        "[a song can also mean danger|each kind of bird has its own song].",
    ),
    "do birds fly south in winter": (
        "birds fly south [because there is little food in winter|to find food and warm weather].",
        "[in spring they come back|they return when it gets warm again].",
    ),
    "do leaves fall in autumn": (
        "trees drop their leaves [to save water in the cold months|because they cannot get "
        "enough water from the frozen ground].",
        "[without leaves the tree can rest until spring|in spring new leaves grow].",
    ),
    "is the sky blue": (
        "sunlight is made of many colours.",
        "[the air scatters the blue light more than the other colours|blue light is spread by "
        "the air in all directions].",
        "[so we see a blue sky|that is why the sky looks blue].",
    ),
    "does it rain": (
        "water from [seas and lakes|the sea] rises into the air as vapour.",
        "[high up it is cold, and the vapour turns into small drops|there it forms clouds].",
        "[when the drops get too heavy, they fall as rain|heavy drops fall down as rain].",
    ),
    "does it snow": (
        "when the air is very cold, water in the clouds [freezes to small crystals|turns into "
        "ice crystals].",
        "[the crystals stick together and fall as snow|these crystals fall down as snowflakes].",
    ),
    "do we sleep": (
        "we sleep [so that the body and the brain can rest|because the body needs time to rest].",
        "[while we sleep, the body repairs itself|during sleep the brain sorts what we have "
        "learned].",
        "[without sleep we feel tired and slow|after a good night we feel fresh].",
    ),
    "do we dream": (
        "nobody knows exactly.",
        "[dreams may help the brain to sort memories|many people think that dreams help us to "
        "deal with our feelings].",
    ),
    "do we need water": (
        "our body is made mostly of water.",
        "[water carries food through the body and keeps it cool|we lose water when we sweat "
        "and breathe].",
        "[so we have to drink every day|that is why we get thirsty].",
    ),
    "do we eat": (
        "food gives us [energy|the energy to move, think and grow].",
        "[the body also uses food to build muscles and bones|without food the body becomes weak].",
    ),
    "do we brush our teeth": (
        "we brush our teeth [to keep them clean and healthy|to remove small bits of food].",
        "[if we do not, sugar and germs make holes in the teeth|clean teeth last longer].",
    ),
    "do we wash our hands": (
        "we wash our hands [to remove dirt and germs|because germs can make us ill].",
        "[soap helps to loosen the dirt|this is important before meals].",
    ),
    "do we cry": (
        "we cry when we are [sad, hurt or very happy|full of strong feelings].",
        "[tears also clean the eyes|after crying many people feel better].",
    ),
    "do we laugh": (
        "we laugh when [something is funny|we are happy or surprised].",
        "[laughing together brings people closer|laughing is good for the body and the mind].",
    ),
    "do we sneeze": (
        "we sneeze [to get dust or germs out of the nose|when something tickles the inside of "
        "the nose].",
        "[the air rushes out very fast|it protects the body].",
    ),
    "do we yawn": (
        "we often yawn when we are [tired or bored|tired].",
        "[nobody knows exactly why|yawning may help to wake up the brain].",
    ),
    "do we have bones": (
        "bones [hold the body up|give the body its shape].",
        "[they also protect soft parts such as the heart and the brain|muscles pull on them so "
        "that we can move].",
    ),
    "do cats have whiskers": (
        "whiskers help a cat [to feel its way in the dark|to know whether it fits through a hole].",
        "[they are very sensitive|even a small touch tells the cat a lot].",
    ),
    "do cats purr": (
        "cats purr [when they feel safe and happy|to show that they are content].",
        "[sometimes they also purr to calm themselves|a mother cat purrs to her kittens].",
    ),
    "do dogs wag their tails": (
        "dogs wag their tails [to show how they feel|when they are happy or excited].",
        "[it is a way of speaking to people and to other dogs|a slow wag may mean that the dog "
        "is unsure].",
    ),
    "do dogs bark": (
        "dogs bark [to warn, to play or to say hello|to tell us something].",
        "[a bark at the door means that someone is there|each bark sounds a little different].",
    ),
    "do bees make honey": (
        "bees make honey [as food for the winter|to have food when there are no flowers].",
        "[they collect nectar from flowers and store it in the hive|they carry nectar home and "
        "dry it].",
    ),
    "do spiders make webs": (
        "spiders make webs [to catch insects|because they eat the insects that get stuck].",
        "[the threads are thin but very strong|the spider feels when something moves in the web].",
    ),
    "do bears sleep in winter": (
        "in winter there is [little food for bears|not much to eat].",
        "[so they eat a lot in autumn and sleep until spring|they live on their fat until it "
        "gets warm].",
    ),
    "do fish have gills": (
        "fish have gills [to breathe under water|because they take oxygen out of the water].",
        "[water flows over the gills and the oxygen goes into the blood|people have lungs "
        "instead].",
    ),
    "do camels have humps": (
        "camels [store fat in their humps|have humps full of fat].",
        "[they use it when there is nothing to eat|so they can walk through the desert for a "
        "long time].",
    ),
    "do giraffes have long necks": (
        "a long neck helps a giraffe [to reach the leaves of tall trees|to eat what other "
        "animals cannot reach].",
        "[it can also see danger from far away|no other animal is as tall].",
    ),
    "do zebras have stripes": (
        "the stripes may [confuse flies and lions|help zebras to hide in a group].",
        "[each zebra has its own pattern|no two zebras look exactly the same].",
    ),
    "do rabbits have long ears": (
        "long ears help rabbits [to hear danger early|to hear a fox from far away].",
        "[they also help them to stay cool|then they can run away in time].",
    ),
    "do plants need light": (
        "plants use light [to make their own food|to make sugar from water and air].",
        "[without light they become weak and pale|that is why a plant grows towards the window].",
    ),
    "do plants need water": (
        "plants need water [to grow and to make food|to carry food from the roots to the leaves].",
        "[without water the leaves hang down|a dry plant soon dies].",
    ),
    "do flowers smell": (
        "flowers smell [to attract bees and butterflies|so that insects can find them].",
        "[the insects carry pollen from flower to flower|then the plant can make seeds].",
    ),
    "do trees have roots": (
        "roots [hold the tree in the ground|keep the tree from falling over].",
        "[they also take up water and food from the soil|old trees have very long roots].",
    ),
    "are trees important": (
        "trees [clean the air and give us shade|make the air fresh].",
        "[many animals live in them|they also give us wood and fruit].",
    ),
    "is the sea salty": (
        "rivers carry [a little salt from rocks|salt from stones] into the sea.",
        "[the water dries up in the sun, but the salt stays|over a very long time the sea "
        "became salty].",
    ),
    "is ice slippery": (
        "there is a very thin layer of water on ice.",
        "[it makes the ice smooth, and our shoes cannot hold on to it|so our feet slide easily].",
    ),
    "does ice float": (
        "ice is lighter than the same amount of water.",
        "[so it stays on top|that is why lakes freeze from the top].",
    ),
    "does the moon shine": (
        "the moon [has no light of its own|does not make its own light].",
        "[it shines because the sun shines on it|we see the light of the sun that it throws back].",
    ),
    "does the sun rise": (
        "the earth turns around once a day.",
        "[when our side turns towards the sun, it is morning|so it looks as if the sun were "
        "rising].",
    ),
    "is it dark at night": (
        "at night our side of the earth [is turned away from the sun|does not face the sun].",
        "[so no sunlight reaches us|the moon and the stars give only a little light].",
    ),
    "are there seasons": (
        "the earth is tilted and moves around the sun.",
        "[so we get more light in summer and less in winter|the part that leans towards the "
        "sun has summer].",
    ),
    "is summer warm": (
        "in summer the days are long and the sun stands high.",
        "[so the ground gets a lot of heat|that makes the air warm].",
    ),
    "do we see a rainbow": (
        "a rainbow appears when the sun shines through [rain|drops of water].",
        "[the drops split the light into many colours|red is on the outside and purple on the "
        "inside].",
    ),
    "do we hear thunder after lightning": (
        "light is much faster than sound.",
        "[so we see the lightning first and hear the thunder later|the longer we wait, the "
        "farther away the storm is].",
    ),
    "do things fall down": (
        "things fall because of gravity.",
        "[the earth pulls everything towards its middle|it is the same force that keeps us on "
        "the ground].",
    ),
    "do boats float": (
        "a boat pushes water away.",
        "[the water pushes back and carries the boat|as long as it is lighter than the water "
        "it pushes away, it floats].",
    ),
    "do we wear coats in winter": (
        "a coat [keeps the warm air close to the body|stops the cold wind].",
        "[so we lose less heat|that way we do not freeze].",
    ),
    "do we have money": (
        "money makes it easy to [buy and sell|trade things].",
        "[without it, we would have to swap one thing for another|everyone knows what a coin "
        "is worth].",
    ),
    "do we go to school": (
        "at school we learn [to read, write and count|many useful things].",
        "[we also learn to work together|we make friends there, too].",
    ),
    "is reading good for you": (
        "reading [teaches you new words|helps you to learn new things].",
        "[it also lets you see the world through other eyes|a good book can make you calm and "
        "happy].",
    ),
    "is exercise important": (
        "exercise keeps the heart and the muscles strong.",
        "[it also helps you to sleep well and to feel happy|even a short walk every day helps].",
    ),
    "are friends important": (
        "friends [listen to us and help us|make us feel less alone].",
        "[good times are better together|in hard times a friend gives us strength].",
    ),
    "is honesty important": (
        "when we are honest, people can trust us.",
        "[a lie often leads to more lies|the truth makes life simpler].",
    ),
    "should we save water": (
        "clean water is [precious|not there for everyone].",
        "[it takes a lot of work to clean it|if we waste it, there is less for people, animals "
        "and plants].",
    ),
    "should we recycle": (
        "recycling [saves energy and materials|turns old things into new ones].",
        "[it also means less rubbish|that keeps nature clean].",
    ),
    "do computers need programs": (
        "a computer only does what it is told.",
        "[a program is a list of steps that it follows|without a program it would not know "
        "what to do].",
    ),
    "do we test programs": (
        "everyone makes mistakes when writing programs.",
        "[tests show the mistakes early|with tests we can change the code without fear].",
    ),
}
TIPS: dict[str, str] = {
    "sleeping well": "Go to bed at the same time every day|Keep your room dark and cool|Do not "
    "look at a screen before bed|"
    "Read a calm book|Do not drink coffee in the evening|Take a warm bath|Write down what "
    "worries you",
    "staying healthy": "Drink enough water|Eat fruit and vegetables every day|Go for a walk|"
    "Sleep at least eight hours|Wash your hands often|Laugh with your friends|"
    "Do not eat too much sugar",
    "learning a language": "Learn a few new words every day|Listen to songs|Speak as often as "
    "you can|"
    "Do not be afraid of mistakes|Read simple books|Find someone to talk to|Write short notes",
    "saving money": "Make a plan for the month|Cook at home|Do not buy things you do not "
    "need|Compare prices|"
    "Put some money away each month|Repair old things|Walk instead of taking the bus",
    "making friends": "Smile and say hello|Listen well|Ask questions|Join a club|Be "
    "honest|Share something you like|Offer your help",
    "studying for a test": "Start early|Make short notes|Take breaks|Explain it to a friend|"
    "Sleep well the night before|Turn off your phone|Practise with old tests",
    "keeping a room tidy": "Put things back after you use them|Make your bed every "
    "morning|Give away what you do not need|"
    "Use boxes for small things|Tidy up for ten minutes a day|Hang up your clothes|Empty the "
    "bin often",
    "cooking": "Read the recipe first|Use fresh vegetables|Taste the food while you cook|"
    "Keep the kitchen clean|Use a sharp knife carefully|Do not use too much salt|"
    "Start with simple dishes",
    "growing plants": "Give them enough light|Water them when the soil is dry|Use good "
    "soil|Turn the pots now and then|"
    "Remove dry leaves|Talk to people who know plants|Choose plants that fit your home",
    "writing a letter": "Begin with a friendly greeting|Use short sentences|Say why you "
    "write|Be polite|Check your spelling|End with kind wishes|Write clearly",
    "giving a speech": "Practise at home|Speak slowly|Look at the people|Use short "
    "sentences|Begin with a story|Take a deep breath|Smile",
    "taking care of a dog": "Walk it every day|Give it fresh water|Feed it at the same "
    "time|Play with it|"
    "Take it to the vet|Brush its fur|Be patient when you train it",
    "taking care of a cat": "Give it fresh water|Clean its box every day|Play with it|"
    "Let it sleep in peace|Take it to the vet|Brush its fur|Give it a place to climb",
    "reading more": "Always carry a book|Read before you go to bed|Visit the library|"
    "Choose books that you enjoy|Turn off the television|Read with a friend|"
    "Start with short books",
    "being more patient": "Take a deep breath|Count to ten|Think of something nice|Plan more time|"
    "Accept that mistakes happen|Take small steps|Rest when you are tired",
    "a good morning": "Get up early|Drink a glass of water|Open the window|Eat a good "
    "breakfast|Make your bed|Listen to music|Plan your day",
    "riding a bicycle safely": "Wear a helmet|Check your brakes|Use a light at night|Look both "
    "ways|"
    "Keep your hands on the bars|Wear bright clothes|Do not ride too fast",
    "travelling": "Pack only what you need|Check your ticket|Take some water|Arrive "
    "early|Learn a few words of the language|Keep your money safe|Take a map",
    "saving energy": "Turn off the lights|Use the bus or a bicycle|Wash clothes in cold water|"
    "Close the windows in winter|Unplug things you do not use|Wear a warm sweater|"
    "Cook with a lid on the pot",
    "drawing better": "Draw a little every day|Start with simple shapes|Look closely at things|"
    "Use a soft pencil|Do not fear mistakes|Learn from other artists|Keep your old drawings",
    "writing a story": "Think of a hero|Give the hero a problem|Write every day|Use strong verbs|"
    "Read your text aloud|Cut what is not needed|Find a good ending",
    "programming": "Write small functions|Give things good names|Test your code|Read code of "
    "other people|Ask for help|Fix one mistake at a time|Take breaks",
    "working at home": "Make a plan for the day|Sit in a quiet place|Take breaks|"
    "Get dressed in the morning|Turn off your phone|Go outside at noon|"
    "Stop at a fixed time",
    "a picnic": "Bring a blanket|Pack sandwiches and fruit|Take enough water|Check the "
    "weather|Choose a place in the shade|Bring a ball|Take your rubbish home",
    "a birthday party": "Write a list of guests|Bake a cake|Plan some games|Put up "
    "balloons|Play music|Ask friends to help|Prepare some drinks",
    "staying calm": "Breathe slowly|Go for a walk|Listen to quiet music|Talk to a friend|Drink "
    "some tea|Think before you speak|Look at the sky",
    "eating better": "Eat more vegetables|Drink water instead of lemonade|Cook fresh food|"
    "Eat slowly|Have fruit as a snack|Do not skip breakfast|Use less sugar",
    "learning an instrument": "Practise every day|Start slowly|Listen to good music|Find a "
    "teacher|Play with friends|Record yourself|Be patient",
    "winter": "Wear warm clothes|Drink hot tea|Walk carefully on ice|Put out food for the "
    "birds|Light a candle|Wear gloves|Enjoy the snow",
    "hot days": "Drink a lot of water|Stay in the shade|Wear a hat|Close the curtains|Eat "
    "light food|Do sports in the evening|Put your feet into cold water",
    "a camping trip": "Take a good tent|Bring a lamp|Pack warm clothes|Check the weather|"
    "Take enough food|Do not camp too close to a river|Leave no rubbish behind",
    "being a good neighbour": "Say hello|Be quiet at night|Offer your help|Keep the stairs clean|"
    "Share a cake|Talk about problems in a friendly way|Water their plants",
    "remembering names": "Repeat the name|Use it when you talk|Think of a picture|Write it down|"
    "Ask again if you forgot it|Listen carefully|Think of someone with the same name",
    "keeping the sea clean": "Use less plastic|Take your rubbish home|Collect rubbish on the "
    "beach|Use a cloth bag|"
    "Tell others about it|Do not pour oil into the sink|Buy fewer bottles",
}
STEPS: dict[str, str] = {
    "make a cup of tea": "Boil some water|Put a tea bag into a cup|Pour the hot water into the cup|"
    "Wait for three minutes|Take out the bag and add milk or sugar",
    "make a sandwich": "Take two slices of bread|Spread butter on them|Add cheese, ham or "
    "vegetables|Put the slices together|Cut the sandwich in half",
    "plant a seed": "Fill a pot with soil|Make a small hole|Put the seed into the hole|Cover "
    "it with soil|Water it and put it in the sun",
    "boil an egg": "Put water into a pot|Let it boil|Put the egg into the water carefully|Wait "
    "for seven minutes|Cool the egg in cold water",
    "wash the dishes": "Fill the sink with warm water|Add some soap|Wash the glasses|Wash the "
    "plates and pots|Dry everything with a towel",
    "write a letter": "Take paper and a pen|Begin with a greeting|Write what you want to "
    "say|End with kind wishes|Put it into an envelope and add a stamp",
    "make pancakes": "Mix flour, milk and eggs|Heat some butter in a pan|Pour in some of the "
    "mixture|"
    "Turn the pancake when it is golden|Serve it with jam or sugar",
    "clean a window": "Fill a bucket with warm water|Add a little soap|Wash the glass with a "
    "cloth|Dry it with paper|Look for spots and wipe them away",
    "make a salad": "Wash the vegetables|Cut them into small pieces|Put them into a bowl|Add "
    "oil, vinegar and salt|Mix everything well",
    "build a snowman": "Roll a big ball of snow|Roll two smaller balls|Put them on top of each "
    "other|"
    "Add stones for the eyes and a carrot for the nose|Give it a hat and a scarf",
    "brush your teeth": "Put some toothpaste on the brush|Brush the front of the teeth|"
    "Brush the back and the top|Do it for two minutes|Rinse your mouth with water",
    "ride a bicycle": "Put on a helmet|Sit on the bicycle and hold the bars|Push off with one "
    "foot|Turn the pedals|Look ahead and keep your balance",
    "paint a room": "Take the furniture out|Cover the floor|Paint the corners with a small "
    "brush|Paint the walls with a roller|Let everything dry",
    "change a light bulb": "Turn off the light|Wait until the bulb is cold|Turn the old bulb "
    "to the left|"
    "Put in the new bulb and turn it to the right|Turn on the light",
    "pack a bag": "Make a list|Put heavy things at the bottom|Roll your clothes|Put small "
    "things into the corners|Check the list again",
    "make lemonade": "Squeeze three lemons|Pour the juice into a jug|Add water and sugar|Stir "
    "well|Add ice and serve it cold",
    "bake bread": "Mix flour, water, yeast and salt|Knead the dough|Let it rest for an "
    "hour|Form a loaf|Bake it until it is brown",
    "fly a kite": "Choose a windy day|Find an open field|Let a friend hold the kite|Run "
    "against the wind|Give it more string as it rises",
    "learn a poem": "Read the poem aloud|Learn the first line|Add one line after the other|Say "
    "it while you walk|Repeat it the next day",
    "fix a flat tyre": "Take off the wheel|Pull out the inner tube|Find the hole|Glue a patch "
    "on it|Put everything back and pump it up",
}


def why(rng: random.Random) -> tuple[str, str]:
    """A question with why and its explanation."""
    key, parts = rng.choice(list(WHY.items()))
    verb, rest = key.split(" ", 1)
    if rng.random() < 0.75:
        ask = say("[why|why|can you tell me why] Q?", {}, rng)
        ask = ask.replace("Q", plain_order(verb, rest) if ask.startswith("Can") else key)
    else:
        ask = (
            say("[explain why|tell me why|explain to a child why] ", {}, rng)
            + plain_order(verb, rest)
            + "."
        )
    keep = parts if rng.random() < 0.75 else parts[:2]
    return ask, " ".join(say(part, {}, rng) for part in keep)


def plain_order(verb: str, rest: str) -> str:
    """`is`, `the sky blue` -> `the sky is blue`; `do`, `birds sing` -> `birds sing`; `does`, `ice
    float` -> `ice floats`."""
    if verb == "do":
        return rest
    words = rest.split()
    if verb == "does":
        return " ".join(words[:-1]) + f" {words[-1]}s"
    cut = 2 if words[0] in {"the"} else 1
    return " ".join([*words[:cut], verb, *words[cut:]])


def tips(rng: random.Random) -> tuple[str, str]:
    """Some tips on a topic, in a list."""
    topic, line = rng.choice(list(TIPS.items()))
    stock = line.split("|")
    n = rng.choice([2, 3, 3, 3, 4, 5])
    s = {"n": NUMBERS[n - 1], "t": topic, "some": rng.choice([NUMBERS[n - 1], "some", "a few"])}
    doing = topic.split()[0].endswith("ing") or topic.startswith("being")
    ask = say(
        rng.choice(
            (
                "[give me|tell me|I need|write|list] {n} tips for {t}.",
                "[give me|tell me|I need|write] {some} [tips|ideas] for {t}.",
                "what are {n} [good |]tips for {t}?",
                "do you have [any|some] [tips|advice] for {t}?",
                "[how can I get better at|I want to get better at] {t}."
                if doing
                else "what should I think of for {t}?",
            )
        ),
        s,
        rng,
    )
    ask = ask.replace("at " + topic + ".", "at " + topic + "?") if ask.startswith("How") else ask
    picked = in_order(stock, n, rng)
    head = rng.choice(("", "", say("here are {n} tips for {t}:", s, rng) + "\n"))
    if rng.random() < 0.75:
        return ask, head + "\n".join(f"{i}. {t}." for i, t in enumerate(picked, 1))
    return ask, head + "\n".join(f"- {t}." for t in picked)


def steps(rng: random.Random) -> tuple[str, str]:
    """Return a question about how something is done, and an answer step by step."""
    task, line = rng.choice(list(STEPS.items()))
    stock = line.split("|")
    s = {"t": task}
    ask = say(
        "[how do I {t}?|how do you {t}?|how can I {t}?|explain how to {t}.|tell me how to "
        "{t}.|what are the steps to {t}?|write down how to {t}.]",
        s,
        rng,
    )
    form = rng.random()
    if form < 0.55:
        return ask, "\n".join(f"{i}. {t}." for i, t in enumerate(stock, 1))
    first, *middle, last = [t[0].lower() + t[1:] for t in stock]
    linkers = rng.sample(["then", "next", "after that", "now"], 3)
    told = [
        f"first, {first}.",
        *(f"{k}, {m}." for k, m in zip(linkers, middle, strict=True)),
        say("[finally|at the end|last of all], {x}.", {"x": last}, rng),
    ]
    return ask, sentences(" ".join(told))


def advice(rng: random.Random) -> tuple[str, str]:
    return tips(rng) if rng.random() < 0.65 else steps(rng)
