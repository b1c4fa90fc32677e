"""Short stories that keep to their prompt: a hero, a wish or a trouble, a friend, an ending.

It knows words and forms, not what a model is.
"""

import random
import re
from dataclasses import dataclass

from demo_recipe import words
from demo_recipe.grammar import articles, listing, say, sentences

Slots = dict[str, str]


@dataclass(frozen=True)
class Plot:
    """`about` completes "a story about <hero> ..."; each stage is a list of forms of which one is
    told."""

    name: str
    about: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]
    morals: tuple[str, ...]


OPENINGS = (
    "[once upon a time|once|long ago|one day|a long time ago|many years ago], there was "
    "{a_kind} [named|called] {hero} who lived in {a_place}.",
    "[once upon a time|once|long ago] there lived {a_kind} [named|"
    "called] {hero}. {he} lived in [a small house|a cosy home|a little hut|a tiny room] in "
    "{a_place}.",
    "{hero} was {a_kind}. {he} lived [near|in|close to|not far from] {a_place}[| with {his} "
    "family| with {his} grandmother| all by {himself}].",
    "in {a_place} there lived {a_kind} [named|called] {hero}. [everyone knew {him}|everybody "
    "liked {him}|{he} was {trait} and [kind|clever|funny]].",
    "there was once {a_kind} whose name was {hero}. {he} [loved|"
    "liked] to [sit in the sun|look at the clouds|sing in the morning|play outside|"
    "walk in the rain|listen to old stories|watch the birds|count the stars].",
    "{a_kind} [named|called] {hero} lived in {a_place}. [every morning|every day|each evening] "
    "{he} [went for a walk|said hello to the sun|"
    "swept the floor|ate {food} for breakfast|looked out of the window|sang a little song].",
)
TIMES = (
    "[one morning|one day|one sunny day|one cold morning|one afternoon|one evening|on a "
    "rainy day|one windy day|on the first day of spring]"
)
FRIENDS = (
    "{his} friend {friend} the {fkind}",
    "{friend} the {fkind}",
    "{a_fkind} named {friend}",
    "{his} neighbour {friend} the {fkind}",
)
ENDINGS = (
    "[from that day on|after that|from then on], {hero} [was never sad again|was always "
    "happy|smiled every day|slept well every night|"
    "told the story to everyone].",
    "that [night|evening], {hero} [went to bed|fell asleep|lay in bed] with a [smile|warm "
    "heart|happy heart].",
    "{hero} and {friend} [stayed friends|were friends] [for ever|for the rest of their "
    "lives|for many years].",
    "and {hero} [never forgot|always remembered] that day.",
    "{hero} [was happy|felt happy|was very happy], and so was {friend}.",
    "the two friends [laughed|sang|danced] [all the way home|until the sun went down|until the "
    "stars came out].",
    "and they all lived happily ever after.",
)
PLOTS = (
    Plot(
        "lost",
        (
            "who [lost|has lost|could not find|loses] {his} {thing}",
            "looking for {a_thing}",
            "and a lost {obj}",
        ),
        (
            (
                TIMES
                + ", {hero} [saw|noticed|found out] that {his} {thing} was [gone|missing|lost].",
                "{hero} had {a_thing} that {he} loved very much. but "
                + TIMES
                + ", it was [gone|missing|nowhere to be seen].",
                "{hero} [never went out without|loved|took good care of] {his} {thing}. "
                + TIMES
                + ", {he} [lost it|could not find it].",
            ),
            (
                '"oh no! where is my {obj}?" {hero} [cried|said|asked]. {he} looked {spot}, '
                "but it was not there.",
                "{he} looked {spot}. {he} looked {spot2}. but the {obj} was not there.",
                "{he} felt very [sad|worried|upset]. {he} looked everywhere, but {he} could "
                "not find the {obj}.",
            ),
            (
                'then {he} met {meet}. "[why are you so sad|what is wrong|can I help you|why '
                'are you crying]?" asked {friend}. '
                '"I have lost my {obj}," said {hero}.',
                '{meet} came by. "have you seen my {obj}?" asked {hero}. "no," said {friend}. '
                '"but I will help you look for it."',
                '{hero} asked {meet} for help. "do not worry," said {friend}. "we will find '
                'your {obj} together."',
            ),
            (
                "they looked [together|for a long time|all day]. at last, {friend} saw "
                "something {colour} {spot}. it was the {obj}!",
                "[together they|so they|the two friends] searched until [the sun went "
                "down|evening|lunch time]. and there, {spot}, was the {obj}!",
                "[after a while|soon|a little later], {friend} called. the {obj} was {spot}.",
            ),
            (
                "{hero} was so happy that {he} [jumped up and down|hugged {friend}|danced in a "
                'circle]. "thank you, {friend}!" {he} said.',
                '"thank you so much!" said {hero}. {he} [gave {friend} a big hug|shared {his} '
                "{food} with {friend}|held the {obj} tight].",
            ),
        ),
        (
            "a good friend helps when you are sad",
            "it is easier to search together",
            "we should take care of our things",
        ),
    ),
    Plot(
        "found",
        (
            "who [found|finds|discovers] {a_thing}",
            "who [found|finds] {a_thing} in the {place}",
            "and {a_thing}",
            "who picked up {a_thing}",
        ),
        (
            (
                TIMES
                + ", {hero} was walking in the {place} when {he} saw something {spot}. it was "
                "{a_thing}!",
                TIMES + ", {hero} found {a_thing} {spot}.",
                "{hero} was [playing|walking home|picking {food}] when {he} [stepped "
                "on|saw|found] something. it was {a_thing}.",
            ),
            (
                '"how [pretty|lovely|wonderful] it is!" said {hero}. {he} wanted to keep it.',
                '{he} had never seen such a [pretty|lovely|fine] {obj}. "I wonder who lost '
                'it," {he} [thought|said].',
                "{he} picked it up and [cleaned it|looked at it closely|turned it around]. "
                '"whose {obj} is this?" {he} asked.',
            ),
            (
                'then {he} heard someone crying. it was {meet}. "I have lost my {obj}," said '
                "{friend}.",
                'soon {he} met {meet}. {friend} looked very sad. "someone gave me {a_thing}, '
                'and now it is gone," {friend} said.',
                '{he} asked everyone in the {place}. at last {he} came to {meet}. "that is my '
                '{obj}!" said {friend}.',
            ),
            (
                "{hero} [thought for a moment|was quiet for a moment|looked at the {obj} one "
                "more time]. then {he} gave the {obj} back.",
                '{hero} did not want to give it away, but {he} knew what was right. "here you '
                'are," {he} said.',
                '"then you must have it back," said {hero}, and gave {friend} the {obj}.',
            ),
            (
                "{friend} was so happy that {fhe} gave {hero} some {food}.",
                '"you are very honest," said {friend}. "will you be my friend?" "yes!" said '
                "{hero}.",
                '{friend} smiled. "thank you," {fhe} said. "come and [play|eat] with me."',
            ),
        ),
        (
            "it is good to be honest",
            "a friend is worth more than a {obj}",
            "giving can make you happier than keeping",
        ),
    ),
    Plot(
        "fear",
        (
            "who [is|was] afraid of {fear}",
            "who is scared of {fear}",
            "who learns not to be afraid of {fear}",
        ),
        (
            (
                "{hero} was [afraid|scared|very afraid] of {fear}. [{he} never told "
                "anyone|everyone knew it|it made {him} sad].",
                "there was one thing that {hero} did not like: {fear}. {he} was [very scared "
                "of it|so afraid that {he} shook].",
                "{hero} could do many things, but {he} was afraid of {fear}.",
            ),
            (
                TIMES + ', {meet} came to visit. "come out and play!" said {friend}. "I can not," '
                'said {hero}. "I am afraid of {fear}."',
                TIMES + ", {hero} heard a cry for help. it was {meet}. {friend} was [stuck "
                "{spot}|lost|all alone].",
                TIMES + ', {hero} told {meet} about it. "everyone is afraid of something," said '
                '{friend}. "I used to be afraid of {fear2}."',
            ),
            (
                '"[hold my hand|stay close to me|take a deep breath]," said {friend}. "we will '
                'do it together."',
                "{hero} took a deep breath. {his} heart [beat fast|was loud like a drum], but "
                "{he} took one step, and then another.",
                '{hero} thought about it for a long time. "I will try," {he} said in a small '
                "voice.",
            ),
            (
                "step by step, {hero} became [braver|less afraid]. nothing bad happened.",
                "{he} was still a little afraid, but {he} did not [stop|run away|turn back]. "
                "and then it was over!",
                "[after a while|soon], {he} saw that {fear} was not so bad. {he} even began to "
                "[smile|laugh|sing].",
            ),
            (
                '"you did it!" [cried|said] {friend}. "you are very brave."',
                '{hero} was [proud|very proud of {himself}|so proud]. "I was brave!" {he} said.',
                '"I am not afraid any more," said {hero}. {friend} [clapped|smiled|gave {him} '
                "a hug].",
            ),
        ),
        (
            "being brave means trying even when you are afraid",
            "fear becomes small when you share it",
            "a friend makes us brave",
        ),
    ),
    Plot(
        "lonely",
        (
            "who has no friends",
            "who [wants|wanted|is looking for] a friend",
            "who is lonely",
            "who makes a new friend",
            "and {a_fkind}",
        ),
        (
            (
                "{hero} was often [alone|lonely]. {he} had no one to play with.",
                "{hero} had [many toys|a nice home|a big garden], but {he} had no friend.",
                'all the others had a friend, but {hero} was alone. "I wish I had a friend," '
                "{he} [said|thought].",
            ),
            (
                TIMES + ", {he} [saw|met] {a_fkind} [sitting {spot}|by the road|at the gate]. the "
                "{fkind} looked lonely too.",
                TIMES
                + ", someone new came to the {place}. it was {a_fkind} [named|called] {friend}.",
                TIMES + ", {he} heard a soft [song|voice|sound] {spot}. it was {a_fkind}.",
            ),
            (
                '"hello," said {hero}. "my name is {hero}. what is your name?" "I am '
                '{friend}," said the {fkind}.',
                '{hero} was shy, but {he} said, "hello! do you want to play {game} with me?" '
                "{friend} [smiled|nodded].",
                '"would you like some {food}?" asked {hero}. "yes, please," said {friend} the '
                "{fkind}.",
            ),
            (
                "they played {game} [all day|until it was dark|the whole afternoon].",
                "they [sat|walked] in the {place}, told [jokes|stories] and ate {food}.",
                "{friend} showed {hero} how to {skill}, and {hero} showed {friend} {his} {thing}.",
            ),
            (
                'when it was time to go home, {friend} said, "[see you tomorrow|let us play '
                'again tomorrow]!"',
                '"will you be my friend?" asked {hero}. "I already am," said {friend}.',
                "{hero} was not lonely any more.",
            ),
        ),
        (
            "a kind word is the start of a friendship",
            "you can find a friend if you say hello",
            "even shy ones find friends",
        ),
    ),
    Plot(
        "share",
        (
            "who [does not want to|did not want to|would not|learns to] share",
            "and some {food}",
            "who had too many {food}",
        ),
        (
            (
                '{hero} had a big basket of {food}. "these are all mine," {he} said.',
                TIMES + ", {hero} found a lot of {food} [in the {place}|{spot}].",
                "{hero} loved {food}. {he} had so many that {he} could not eat them all.",
            ),
            (
                'then {meet} came by. "I am so hungry," said {friend}. "may I have some {food}?"',
                '{meet} had nothing to eat. "could you give me a few?" {friend} asked.',
                "{he} met {meet}, who had not eaten all day.",
            ),
            (
                '"no!" said {hero}. {he} ate and ate until {his} [tummy|stomach] hurt. '
                "{friend} walked away sadly.",
                "{hero} looked at the {food}. {he} did not want to give any away. but {friend} "
                "looked so [hungry|sad|thin].",
                "at first {hero} said no. but then {he} could not enjoy the {food} any more.",
            ),
            (
                '{he} [felt bad|felt sorry|thought about it]. "wait!" {he} called. "you can '
                'have half of my {food}."',
                'so {he} [ran after {friend}|called {friend} back] and said, "I am sorry. let '
                'us eat together."',
                'then {he} smiled and said, "there is enough for two."',
            ),
            (
                "they sat down {spot} and ate together. the {food} had never tasted so good.",
                "{friend} was very thankful. the next day, {fhe} brought {hero} {a_thing}.",
                "they shared the {food} and [told stories|laughed a lot|became friends].",
            ),
        ),
        (
            "sharing makes everything taste better",
            "when we share, we both have more",
            "it is better to share than to be alone",
        ),
    ),
    Plot(
        "race",
        (
            "who wants to win a race",
            "in a race",
            "who runs a race with {a_fkind}",
            "and a big race",
        ),
        (
            (
                "every year there was a race in the {place}. {hero} wanted to win it [very "
                "much|more than anything].",
                TIMES + ", there was a race [around the {place}|to the old tree|to the river and "
                "back]. {hero} wanted to [take part|win].",
            ),
            (
                '{meet} laughed. "you can never win," {fhe} said. "you are too '
                '[slow|small|young]."',
                "{he} [ran|practised] every morning, even in the rain.",
                "{hero} was not fast, but {he} never gave up.",
            ),
            (
                "the race began. {friend} the {fkind} was [far ahead|the first]. {hero} ran as "
                "fast as {he} could.",
                '"one, two, three, go!" everyone ran. {friend} the {fkind} was the fastest. '
                "{hero} was [last|in the middle|second].",
            ),
            (
                "suddenly {friend} [fell down|hurt {fhis} foot|fell into a hole]. {hero} could "
                "win now! but {he} stopped and helped {friend} up.",
                "{friend} was so sure of winning that {fhe} [lay down to sleep|stopped to eat "
                "{food}|sat down to rest]. {hero} ran on and on.",
                'half way, {hero} was very tired. but {he} thought, "one more step, and one '
                'more step."',
            ),
            (
                "they [crossed|reached] the line together, and everyone cheered.",
                "at the end, {hero} came first. everyone [cheered|clapped].",
                "{hero} did not win the race, but {he} was proud, because {he} had done {his} "
                "best.",
            ),
        ),
        (
            "slow and steady is a good way to go",
            "doing your best is what counts",
            "helping is better than winning",
        ),
    ),
    Plot(
        "storm",
        ("in a storm", "and the big storm", "who is caught in a storm", "and a rainy night"),
        (
            (
                TIMES
                + ", dark clouds came over the {place}. the wind [blew|howled] and it began to "
                "rain.",
                "[one night|one evening] there was a great storm. the wind shook the trees of "
                "the {place}.",
                TIMES + ", {hero} was far from home when the sky turned black and a storm began.",
            ),
            (
                "{hero} ran [to find a dry place|home as fast as {he} could]. on the way {he} "
                "saw {meet}, wet and cold.",
                "{hero} was sitting by the fire when {he} heard a knock at the door. it was "
                "{meet}.",
                "{he} hid {spot}. there sat {meet}, shaking with cold.",
            ),
            (
                '"[come in|come with me|sit next to me]," said {hero}. "it is [warm|dry] here."',
                '"my house is broken," cried {friend}. "then stay with me," said {hero}.',
                "{hero} gave {friend} {his} {thing} [and some {food}|and a cup of tea|to keep "
                "warm].",
            ),
            (
                "they listened to the [rain|thunder] and told each other [stories|jokes] all "
                "night.",
                "they sat close together and sang songs until the storm was over.",
                "outside the storm was loud, but inside it was [warm|safe] and they ate {food}.",
            ),
            (
                "in the morning, the sun came out and there was a rainbow over the {place}.",
                "the next day, {hero} helped {friend} to [build a new house|find the way "
                "home|clean up].",
            ),
        ),
        (
            "a storm is not so bad with a friend",
            "after the rain comes the sun",
            "a small kindness can be a big help",
        ),
    ),
    Plot(
        "garden",
        (
            "who plants a {seed} seed",
            "and a {seed} seed",
            "who [grows|grew] a {seed} plant",
            "who has a garden",
        ),
        (
            (
                TIMES + ', {hero} found a tiny seed. "I will plant it," {he} said.',
                '{meet} gave {hero} a {seed} seed. "take good care of it," said {friend}.',
                "{hero} wanted to have a garden. so {he} bought a {seed} seed at the market.",
            ),
            (
                "{he} dug a small hole, put the seed in and gave it some water.",
                "{he} planted the {seed} seed {spot} and watered it every day.",
            ),
            (
                "{he} waited one day. {he} waited two days. but nothing happened.",
                'every morning {he} looked, but there was only brown earth. "why does it not '
                'grow?" {he} asked {friend}.',
                "after a week there was still nothing to see. {hero} was sad.",
            ),
            (
                '"be patient," said {friend}. "good things need time."',
                '"it needs sun, water and time," said {friend}. so {hero} waited and sang to '
                "the seed.",
            ),
            (
                "then, one morning, there was a small green leaf! soon it was a big {seed} plant.",
                "and one day a little green plant came out of the earth. it grew and grew "
                "until it was [as tall as {hero}|taller than {hero}].",
                "in summer, the {seed} plant was the [biggest|prettiest|finest] in the {place}.",
            ),
            (
                "{hero} and {friend} sat [next to it|in its shade] and were proud.",
                "everyone came to see it, and {hero} gave a seed to each of them.",
            ),
        ),
        ("good things need time", "with care, small things become big", "patience is worth it"),
    ),
    Plot(
        "learn",
        (
            "who [wants|wanted] to learn to {skill}",
            "who [cannot|could not] {skill}",
            "who learns to {skill}",
            "who wants to {skill}",
        ),
        (
            (
                "more than anything, {hero} wanted to {skill}. but {he} did not know how.",
                "all {his} friends could {skill}, but {hero} could not.",
                TIMES
                + ', {hero} saw {a_fkind} who could {skill}. "I want to do that too!" {he} said.',
            ),
            (
                "the first time {he} tried, it went wrong and everyone laughed.",
                '{he} tried and tried, but it did not work. "I will never learn it," {he} said.',
                "{he} tried it alone, but it was too hard. {he} sat down {spot} and cried.",
            ),
            (
                'then {meet} said, "I will [teach|help|show] you. but you must practise every '
                'day."',
                '{meet} saw {him} and said, "nobody can do it the first time. try again."',
            ),
            (
                "so {hero} practised [every day|each morning|day after day]. {he} made many "
                "mistakes, but {he} did not give up.",
                "they practised together in the {place}. it got a little better every day.",
                "{he} practised in the sun and in the rain.",
            ),
            (
                "and one day it worked! {hero} could {skill}!",
                "after some weeks, {hero} could {skill} as well as {friend}.",
                'at last {he} could {skill}. "look at me!" {he} called.',
            ),
            (
                "{friend} was proud of {him}.",
                '"I knew that you could do it," said {friend}.',
                "everyone clapped and {hero} [laughed|smiled|bowed].",
            ),
        ),
        (
            "practice makes us better",
            "you should never give up",
            "every master was once a beginner",
        ),
    ),
    Plot(
        "sorry",
        (
            "who broke {a_thing}",
            "who [tells|told] the truth",
            "who breaks {his} friend's {obj}",
            "who says sorry",
        ),
        (
            (
                "{friend} the {fkind} had {a_thing}. {hero} [loved to look at it|wanted to "
                "play with it|was not allowed to touch it].",
                TIMES
                + ", {hero} was playing with {a_thing} that belonged to {his} friend {friend} "
                "the {fkind}.",
            ),
            (
                "suddenly it fell down and broke. {hero} was very [scared|sorry|worried].",
                "but {he} was not careful, and the {obj} broke.",
            ),
            (
                "{he} hid the {obj} {spot} and ran away.",
                '"if I say nothing, nobody will know," {he} thought. but {he} could not sleep '
                "that night.",
                '"who broke my {obj}?" asked {friend}. {hero} said nothing and looked at the '
                "floor.",
            ),
            (
                'in the end {he} went to {friend}. "I broke your {obj}. I am very sorry," {he} '
                "said.",
                "{his} heart felt heavy. so {he} told {friend} the truth.",
            ),
            (
                '{friend} was [quiet|sad] for a moment. then {fhe} said, "thank you for '
                'telling me the truth."',
                '"I am not angry," said {friend}. "it was brave to tell me."',
            ),
            (
                "together they [mended|repaired|fixed] the {obj}[| with glue| and it was as "
                "good as new].",
                "{hero} worked hard and bought a new {obj} for {friend}.",
            ),
        ),
        (
            "it is best to tell the truth",
            "saying sorry makes the heart light",
            "a true friend can forgive",
        ),
    ),
    Plot(
        "gift",
        (
            "who [makes|made] a gift",
            "who [wants|wanted] to give {friend} a birthday present",
            "and the birthday party",
            "who has a birthday",
        ),
        (
            (
                "it was the birthday of {his} best friend, {friend} the {fkind}. {hero} wanted "
                "to give {fhim} something special.",
                "{friend} the {fkind} had a birthday soon. but {hero} had no money to buy a gift.",
            ),
            (
                '"what could I give?" {hero} [asked|thought]. {he} looked {spot}, but {he} '
                "found nothing.",
                "{he} thought and thought. a {thing2}? some {food}? nothing seemed right.",
            ),
            (
                "then {he} had an idea. {he} would make {a_thing} with {his} own hands.",
                "so {he} took [some paper|some wood|a bit of wool|old cloth] and began to make "
                "{a_thing}.",
            ),
            (
                "it took all [day|night|week]. it was not perfect, but it was made with love.",
                "{he} worked until late at night. at last the {obj} was ready.",
            ),
            (
                'when {friend} opened the gift, {fhis} eyes [shone|grew big]. "{a_thing}! this '
                'is the best gift of all," {fhe} said.',
                '"did you make this {obj} for me?" asked {friend}. {fhe} was so happy that '
                "{fhe} [danced|cried a little|hugged {hero}].",
            ),
            ("then they ate {food} and played {game}.", "they had a party with {food} and music."),
        ),
        (
            "the best gifts come from the heart",
            "a gift does not have to cost much",
            "love is the best present",
        ),
    ),
    Plot(
        "journey",
        (
            "who [wants|wanted|goes|travels] to see {sight}",
            "who goes on a long journey",
            "who goes on an adventure",
        ),
        (
            (
                "{hero} had one big dream. {he} wanted to see {sight}.",
                "{hero} had heard many stories about {sight}. "
                + TIMES
                + ", {he} packed {his} bag and set off.",
            ),
            (
                "{he} took {his} {thing} and some {food} and said goodbye.",
                "{he} walked and walked, over hills and along rivers.",
            ),
            (
                'on the way {he} met {meet}. "where are you going?" asked {friend}. "I want to '
                'see {sight}," said {hero}. "may I come with you?"',
                "{he} came to a [wide river|dark forest|high wall] and did not know what to "
                "do. there {he} met {meet}, who showed {him} the way.",
            ),
            (
                "together they [crossed a river|climbed a steep hill|slept under the stars] "
                "and shared the {food}.",
                "the way was long, and their feet hurt, but they sang songs and told jokes.",
            ),
            (
                "at last they saw it: {sight}! it was more beautiful than {hero} had dreamed.",
                "after three days they were there. they sat down and looked and did not say a "
                "word.",
            ),
            (
                '"I am glad that you came with me," said {hero}.',
                "then they went home and told everyone about {sight}.",
            ),
        ),
        (
            "a long way is short with a friend",
            "dreams can come true if you begin to walk",
            "the journey can be as good as the goal",
        ),
    ),
    Plot(
        "cook",
        ("who [cooks|cooked|makes|wants to make] {dish}", "who learns to cook", "and {dish}"),
        (
            (
                TIMES + ", {hero} wanted to make {dish} for {his} friends.",
                '{hero} was hungry. "today I will make {dish}," {he} said.',
            ),
            (
                "but there was no [salt|flour|sugar|milk|butter] in the house. so {he} went to "
                '{meet}. "can you give me some?" {he} asked.',
                '{he} put in too much [salt|sugar|pepper]. "oh dear," {he} said, "this tastes '
                'terrible."',
            ),
            (
                '{friend} said, "I will help you if I may eat with you."',
                '{meet} came to help. "let us try it again," said {friend}.',
            ),
            (
                "they stirred and tasted and laughed. [flour was everywhere|soon the kitchen "
                "was warm|it smelled wonderful].",
                "{friend} washed the {food}, and {hero} cut them into small pieces.",
            ),
            (
                "when it was ready, they called all their friends. everyone ate and asked for "
                "more.",
                "it was the best meal that they had ever eaten.",
            ),
        ),
        (
            "cooking is more fun together",
            "a mistake is a chance to try again",
            "food tastes best with friends",
        ),
    ),
    Plot(
        "rescue",
        (
            "who [helps|saves|rescues] {a_fkind}",
            "who [helped|saved|rescued] {a_fkind}",
            "who finds {a_fkind} in trouble",
        ),
        (
            (
                TIMES + ', {hero} heard a small voice: "help! help!"',
                TIMES + ", {hero} was walking in the {place} when {he} heard someone crying.",
            ),
            (
                "it was {a_fkind} [named|called] {friend}. {fhe} was stuck {spot} and could "
                "not get out.",
                "there was {a_fkind} who had [fallen into a hole|hurt {fhis} foot|lost {fhis} "
                "mother]. {fhis} name was {friend}.",
            ),
            (
                '"do not be afraid," said {hero}. "I will help you."',
                '{hero} was small, but {he} did not run away. "hold on!" {he} called.',
            ),
            (
                "{he} took {his} {thing} and used it to [pull {friend} out|reach {friend}|make "
                "a little bridge].",
                "{he} pulled and pulled. at last, {friend} was free.",
                "{he} ran to get help, and soon everyone came and [pulled|lifted] together.",
            ),
            (
                '"you saved me!" said {friend}. "how can I thank you?" "just be my friend," '
                "said {hero}.",
                "{friend} was so thankful that {fhe} gave {hero} {a_thing2}.",
            ),
            (
                "some weeks later, {hero} was in trouble, and this time {friend} helped {him}.",
                "{hero} brought {friend} home and they ate {food}.",
            ),
        ),
        ("even the small can help", "kindness always comes back", "one good turn deserves another"),
    ),
    Plot(
        "proud",
        ("who [thinks|thought] {he} is the best", "who is too proud", "who always boasts"),
        (
            (
                '{hero} was very proud. "nobody can {skill} like me," {he} said every day.',
                '{hero} had {a_thing}, and {he} showed it to everyone. "mine is the best," '
                "{he} said.",
            ),
            (
                "the others were tired of it. nobody wanted to play with {him} any more.",
                '{meet} said, "you should not boast so much." but {hero} only laughed.',
            ),
            (
                TIMES + ", {hero} [fell into the pond|got lost in the {place}|fell from a tree and "
                "hurt {his} foot].",
                TIMES + ", something went wrong and {hero} needed help.",
            ),
            (
                "{he} called and called. then {friend} the {fkind} came and helped {him} home.",
                '"I can not do it alone," {he} cried. and it was {friend} the {fkind} who came.',
            ),
            (
                '"why did you help me?" asked {hero}. "because everyone needs help sometimes," '
                "said {friend}.",
                '{hero} was ashamed. "I am sorry that I boasted," {he} said.',
            ),
        ),
        (
            "pride comes before a fall",
            "it is better to be kind than to be the best",
            "nobody is good at everything",
        ),
    ),
    Plot(
        "wish",
        (
            "who makes a wish",
            "who [catches|finds] a star",
            "who wishes for {a_thing}",
            "and a magic {obj}",
        ),
        (
            (
                'one night {hero} saw a star fall from the sky. "I wish for {a_thing}," {he} said.',
                TIMES + ', {hero} found a magic {obj} {spot}. "make a wish," it said.',
            ),
            (
                "in the morning, there was {a_thing} next to {his} bed!",
                "there was a flash of light, and {his} wish came true.",
            ),
            (
                "at first {he} was very happy. but soon {he} saw that {meet} had nothing at all.",
                "{he} showed it to {meet}. {friend} was happy for {him}, but {fhis} eyes were sad.",
            ),
            (
                'so {hero} went out and looked up to the stars again. "please give my friend a '
                'wish too," {he} said.',
                '"I have one more wish," said {hero}. "I wish that {friend} may be happy."',
            ),
            (
                "the star [shone|winked] brightly. and the next day {friend} [was laughing and "
                "singing|found {a_thing2}|felt much better].",
                "and that was the best wish of all.",
            ),
        ),
        (
            "it is good to wish something for others",
            "happiness grows when it is shared",
            "a kind heart is better than magic",
        ),
    ),
    Plot(
        "treasure",
        ("who finds a treasure map", "who looks for a treasure", "and the hidden treasure"),
        (
            (
                TIMES + ", {hero} found an old map {spot}. there was a red cross on it.",
                '{his} grandfather gave {hero} an old map. "it shows the way to a treasure," '
                "he said.",
            ),
            (
                '{he} showed it to {meet}. "let us find it together," said {friend}.',
                '"a treasure!" said {hero}. {he} took {his} {thing} and called {meet}.',
            ),
            (
                "they walked through the {place} and over a bridge. they counted {number} "
                "steps from the old tree.",
                "first they went to the {place}. then they climbed over some rocks and crawled "
                "through a cave.",
            ),
            (
                "there they dug a deep hole. they found a box with a {colour} lock.",
                "under a big stone they found a small wooden box.",
            ),
            (
                "in the box there was no gold. there was {a_thing2} and a letter. it said: "
                '"the real treasure is the friend who came with you."',
                "the box was full of {food}. they laughed and ate them all.",
                "inside they found {a_thing2} and many shiny coins. they gave the coins to the "
                "poor.",
            ),
        ),
        (
            "friends are the real treasure",
            "an adventure is better with a friend",
            "not all treasures are made of gold",
        ),
    ),
    Plot(
        "night",
        ("who [hears|heard] a strange noise", "who cannot sleep", "and the noise in the night"),
        (
            (
                "one night, {hero} could not sleep. there was a strange noise {spot}.",
                "it was late at night. {hero} lay in bed and heard a noise: [tap, tap, "
                "tap|scratch, scratch|whoo, whoo|bump, bump].",
            ),
            (
                '"who is there?" {he} [asked|whispered]. nobody answered.',
                "{he} pulled the blanket over {his} head. the noise came again.",
            ),
            (
                "then {he} took {his} lamp and went to see. {his} knees were shaking.",
                "at last {he} got up and walked slowly to the door.",
            ),
            (
                'it was only {a_fkind}! "I am sorry," said the {fkind}. "my name is {friend}. '
                'I was looking for [some {food}|my mother|a warm place]."',
                "and there sat {a_fkind} named {friend}, who was [cold|hungry|lost].",
            ),
            (
                '{hero} laughed. "you are not a monster at all! come in," {he} said.',
                '"you scared me," said {hero}, "but now I am glad that you are here."',
            ),
            (
                "they drank warm milk, and then they both fell asleep.",
                "{hero} gave {friend} some {food} and a blanket.",
            ),
        ),
        (
            "things are often less scary than they seem",
            "it is good to look before you are afraid",
            "a stranger may become a friend",
        ),
    ),
    Plot(
        "moving",
        ("who moves to a new home", "on the first day of school", "who is new in the {place}"),
        (
            (
                "{hero} was new in the {place}. {he} did not know anyone.",
                "it was the first day of school for {hero}. {he} was a little afraid.",
            ),
            (
                '"what if nobody likes me?" {he} asked {his} mother. "just be yourself," she said.',
                "{he} missed {his} old home and {his} old friends.",
            ),
            (
                "{he} sat alone with {his} {thing}. the others were playing {game}.",
                "all the others knew each other. {hero} stood {spot} and watched them.",
            ),
            (
                'then {meet} came over. "I like your {obj}," said {friend}. "can you {skill}?"',
                'then {meet} asked, "do you want to play with us?"',
            ),
            (
                "{hero} nodded, and soon they were laughing together.",
                '"yes!" said {hero}. they played {game} and ate {food}.',
            ),
            (
                'in the evening {hero} said, "I like it here."',
                "when {he} came home, {he} told {his} mother all about {friend}.",
            ),
        ),
        (
            "it takes one friend to feel at home",
            "a new place can bring new friends",
            "a smile opens doors",
        ),
    ),
    Plot(
        "ill",
        ("whose friend is ill", "who visits a sick friend", "who looks after {a_fkind}"),
        (
            (
                TIMES + ", {friend} the {fkind} was ill and had to stay in bed.",
                "{hero} waited at the gate, but {friend} the {fkind} did not come. {fhe} was ill.",
            ),
            (
                '{hero} [was worried|missed {fhim}|did not want to play alone]. "{friend} must '
                'be lonely," {he} thought.',
                '"I will visit {fhim}," said {hero}, and {he} [put on {his} coat|took {his} '
                "bag|left at once].",
            ),
            (
                "{he} cooked {dish} and packed some {food}.",
                "{he} picked flowers on the way and took {a_thing} with {him}.",
            ),
            (
                '{friend} [smiled|sat up|was so glad] when {hero} came in. "how good that you '
                'are here," {fhe} said.',
                '"who is there?" asked {friend} in a weak voice. "it is me, {hero}!"',
            ),
            (
                "{hero} told {fhim} [a funny story|all the news|a long tale about {sight}], "
                "and {friend} laughed so much that {fhe} forgot {fhis} pain.",
                "they played {game} on the bed, and {hero} made some tea.",
            ),
            (
                "after [a few|two|three] days, {friend} was well again.",
                "soon {friend} could go outside, and the first thing {fhe} did was to hug {hero}.",
            ),
        ),
        ("a visit can be the best medicine", "friends care for each other", "time is a fine gift"),
    ),
    Plot(
        "quarrel",
        ("who [quarrels|argues] with a friend", "and a quarrel", "who is angry with {his} friend"),
        (
            (
                "{hero} and {friend} the {fkind} were best friends. but "
                + TIMES
                + ", they both wanted the same {obj}.",
                '{friend} the {fkind} had a new {obj}. "let me have it," said {hero}. "no," '
                'said {friend}, "it is mine."',
            ),
            (
                'they pulled and shouted. "I do not want to see you again!" cried {hero}.',
                "they began to shout. then each of them went home and shut the door.",
            ),
            (
                "but the next day was [long|boring|grey]. {hero} had nobody to play {game} with.",
                "{hero} sat {spot} and was angry. after an hour {he} was only sad.",
            ),
            (
                '"what is {a_obj} without a friend?" {he} thought. {he} took some {food} and '
                "walked to the house of {friend}.",
                '{his} grandmother said, "the first one to say sorry is the stronger one." so '
                "{hero} got up and went to {friend}.",
            ),
            (
                'half way {he} met {friend}, who was on the way to {him}. "I am sorry," they '
                "both said at the same time.",
                '"I was silly," said {hero}. "so was I," said {friend}.',
            ),
            (
                "they laughed, and now the {obj} belonged to both of them.",
                "from now on they used the {obj} together.",
            ),
        ),
        (
            "it is brave to say sorry first",
            "a friend is worth more than a thing",
            "every quarrel can end",
        ),
    ),
    Plot(
        "trick",
        (
            "who is very clever",
            "who plays a trick on {a_fkind}",
            "and the hungry {fkind}",
            "who is smarter than {a_fkind}",
        ),
        (
            (
                TIMES
                + ', {hero} met a hungry {fkind} called {friend}. "I am going to eat all your '
                '{food}," said {friend}.',
                "a big {fkind} named {friend} stood {spot} and would not let anyone pass.",
            ),
            (
                "{hero} was afraid, but {he} had an idea.",
                "{hero} was small, but {his} head was full of ideas.",
            ),
            (
                '"wait," {he} said. "there is something much better in the {place}."',
                '"you may have them," {he} said, "if you can [count all the stars|catch your '
                'own shadow|carry water in a basket]."',
            ),
            (
                "{friend} believed it and ran away as fast as {fhe} could.",
                "{friend} tried and tried, all day long, until {fhe} was tired.",
            ),
            (
                "{hero} [laughed|smiled] and went home with {his} {food}.",
                'in the end {friend} had to laugh. "you are cleverer than I am," {fhe} said.',
            ),
            (
                "they became friends, because {hero} gave {friend} some of the {food} after all.",
                "everyone in the {place} [thanked {hero}|was proud of {hero}|talked about it "
                "for a long time].",
            ),
        ),
        (
            "a clever head is better than strong arms",
            "thinking first is a good plan",
            "even the small can win",
        ),
    ),
    Plot(
        "snow",
        (
            "who [sees|saw] snow for the first time",
            "and a snowman",
            "who builds a snowman",
            "in winter",
        ),
        (
            (
                "when {hero} woke up, everything was white. it had snowed all night!",
                TIMES + " in winter, soft white flakes fell on the {place}. {hero} had never seen "
                "snow before.",
            ),
            (
                "{he} ran outside. the snow was cold and [soft|deep], and it made a funny "
                "sound under {his} feet.",
                '"the sky is falling down!" {he} cried. {friend} the {fkind} laughed. "no, it '
                'is only snow," {fhe} said.',
            ),
            (
                "{hero} and {friend} the {fkind} rolled a big ball, and then a smaller one.",
                '"let us build a snowman," said {friend}. they worked until their noses were red.',
            ),
            (
                "they gave him stones for eyes, a carrot for a nose and {a_thing} on top.",
                "the snowman got {a_thing} and looked very fine.",
            ),
            (
                'at night {hero} looked out of the window. "good night, snowman," {he} said.',
                "when it was dark, they went in and drank hot milk.",
            ),
            (
                'in spring the snowman was gone, but {hero} was not sad. "he will come back '
                'next winter," {he} said.',
                "a week later the sun melted him, and only the {obj} was left.",
            ),
        ),
        ("every season has its joy", "we should enjoy the moment", "cold days can be fun"),
    ),
    Plot(
        "music",
        (
            "who loves music",
            "who plays the {instrument}",
            "and {his} {instrument}",
            "who wants to sing in a concert",
        ),
        (
            (
                "{hero} loved music more than anything. every evening {he} played the "
                "{instrument}.",
                "{his} grandfather had given {him} a {instrument}. {hero} played it day and night.",
            ),
            (
                "but the neighbours said that it was too loud.",
                "but {he} was too shy to play for others. {he} only played {spot}.",
            ),
            (
                TIMES + ', {meet} heard {him}. "that is [beautiful|wonderful]!" {fhe} said. "you '
                'must play at the fair."',
                '"you play so well," said {friend} the {fkind} '
                + 'one evening. "why do you hide?"',
            ),
            (
                "on the day of the fair, {his} hands shook. so many faces looked at {him}.",
                "{he} stood there and could not begin. then {he} saw {friend}, who smiled at "
                "{him}.",
            ),
            (
                "{he} closed {his} eyes and began to play. it was so quiet that you could hear "
                "a leaf fall.",
                "after the first notes {he} forgot the people and only heard the music.",
            ),
            (
                "when {he} stopped, everyone clapped and asked for more.",
                "even the oldest ones began to dance.",
            ),
        ),
        (
            "it is good to show what you love",
            "music brings everyone together",
            "a shy heart can do great things",
        ),
    ),
    Plot(
        "lazy",
        ("who is lazy", "who does not want to work", "who sleeps all day"),
        (
            (
                "{hero} did not like to work. {he} slept all day {spot}.",
                "all summer long {hero} lay in the sun and did nothing at all.",
            ),
            (
                '{friend} the {fkind} was busy. {fhe} collected {food} for the winter. "you '
                'should do that, too," {fhe} said.',
                '"come and help me," called {friend} the {fkind}. "tomorrow," said {hero}, and '
                "went back to sleep.",
            ),
            (
                "then the cold days came. {hero} had nothing to eat, and the wind blew through "
                "{his} house.",
                "but then winter came, and {hero} was cold and hungry.",
            ),
            (
                '{he} knocked at the door of {friend}. "please, may I come in?" {he} asked.',
                'at last {he} went to {friend}. "you were right," {he} said. "I am sorry that '
                'I was so lazy."',
            ),
            (
                '{friend} thought for a moment. "come in," {fhe} said, "but next year you will '
                'help me."',
                "{friend} gave {him} warm soup and some {food}.",
            ),
            (
                "the next summer, {hero} worked every day, and it was even fun.",
                "{hero} kept {his} word. in the next year {he} was the first to get up.",
            ),
        ),
        (
            "work comes before rest",
            "it is wise to plan for hard times",
            "doing your part feels good",
        ),
    ),
    Plot(
        "letter",
        ("who [gets|writes|found] a letter", "and the secret letter", "who waits for a letter"),
        (
            (
                TIMES + ", there was a letter at the door. {hero} opened it with shaking hands.",
                "every day {hero} waited for the post. " + TIMES + ", there was a letter at last.",
            ),
            (
                'it said: "come to the old tree when the moon is up. your friend." but there '
                "was no name.",
                '"please come to the {place} tonight," it said. {hero} did not know who had '
                "written it.",
            ),
            (
                '"who could that be?" {he} wondered all day. {he} could hardly eat {his} {food}.',
                "{he} asked everyone, but nobody knew anything. they only "
                "[smiled|laughed|looked away].",
            ),
            (
                "in the evening {he} took {his} {thing} and went out into the dark.",
                "when the moon came up, {hero} walked there as quietly as {he} could.",
            ),
            (
                'suddenly there was light everywhere! "surprise!" cried {friend} the {fkind} '
                "and all the others.",
                'there stood {friend} the {fkind} with a big cake. "happy birthday!" {fhe} said.',
            ),
            (
                "they danced and ate {food} until midnight.",
                "{hero} was so surprised that {he} could not speak. then {he} hugged them all.",
            ),
        ),
        ("good friends think of you", "some secrets are happy ones", "waiting can be worth it"),
    ),
    Plot(
        "paint",
        ("who [paints|painted] a picture", "who loves colours", "and a box of colours"),
        (
            (
                "{hero} had a box with seven colours. {he} painted from morning to night.",
                "the {place} was grey and dull, and {hero} did not like that.",
            ),
            (
                TIMES + ', {he} painted {a_fkind}, but everyone said, "that looks like a {kind}!"',
                "{he} painted the fence {colour}. {he} painted the door, too.",
            ),
            (
                "{hero} wanted to throw the picture away.",
                'some of the neighbours were angry. "who did that?" they asked.',
            ),
            (
                'but {friend} the {fkind} said, "I like it. it makes me happy when I look at it."',
                'then {friend} the {fkind} came and said, "it looks much nicer now! can you '
                'paint my {obj}, too?"',
            ),
            (
                "so {hero} went on, and the pictures became better every day.",
                "soon everyone wanted something {colour}, and {hero} had a lot to do.",
            ),
            (
                "today there is a picture by {hero} in every house of the {place}.",
                "and the grey {place} became the most colourful one in the land.",
            ),
        ),
        (
            "there is beauty in trying",
            "one small idea can change a place",
            "you should do what you love",
        ),
    ),
    Plot(
        "boat",
        ("who builds a boat", "who sails across a lake", "on a small boat", "and a little boat"),
        (
            (
                "{hero} lived near the water and often watched the ships.",
                '"one day I will sail," {hero} said to {friend} the {fkind}.',
            ),
            (
                "so {he} took some old wood, a rope and a sheet and built a boat.",
                "{he} worked for [a week|ten days|a month], and then the boat was ready. it "
                "was small and {colour}.",
            ),
            (
                TIMES
                + ", {hero} and {friend} the {fkind} set sail. they took {food} and {a_thing} "
                "with them.",
                "{friend} the {fkind} came along, although {fhe} was afraid of {fear}.",
            ),
            (
                "the wind was good, and the boat [danced|jumped] over the waves.",
                "at first it was easy. then a wave came over the side and they were both wet.",
            ),
            (
                "suddenly there was a hole in the boat! {hero} closed it with {his} {obj}.",
                "in the middle of the lake the wind stopped. they had to row with their hands.",
            ),
            (
                "late in the evening they came home, tired and happy.",
                '"that was the best day of my life," said {friend} when they were back on land.',
            ),
        ),
        ("with courage you can go far", "a dream needs work", "two are stronger than one"),
    ),
    Plot(
        "baby",
        ("who finds an egg", "and a strange egg", "who takes care of a baby bird"),
        (
            (
                TIMES + ", {hero} found an egg {spot}. it was {colour} and still warm.",
                'there was an egg {spot}. "whose egg is this?" asked {hero}.',
            ),
            (
                "{he} asked {friend} the {fkind}, but {fhe} had never seen such an egg.",
                "{he} looked for the mother, but there was nobody.",
            ),
            (
                "so {hero} wrapped it in a blanket and kept it warm.",
                '"I will take care of you," {he} said, and {he} stayed with it all night.',
            ),
            (
                "in the morning there was a little crack. out came a tiny bird!",
                "after [three|five|seven] days, it broke open, and a small wet bird looked at "
                "{him}.",
            ),
            (
                '"mama!" said the bird, and {hero} had to laugh.',
                "{he} fed it and gave it the name [Pip|Peep|Dot|Fluff].",
            ),
            (
                "in autumn the bird flew away, but every spring it came back.",
                "soon it could fly, and it sat on {his} shoulder wherever {he} went.",
            ),
        ),
        ("small ones need our care", "love makes a family", "letting go is part of love"),
    ),
)


WORDED = {"lost", "found", "gift", "wish"}  # plots that always name their thing


def pronouns(kind: str, rng: random.Random) -> tuple[str, str, str, str]:
    """He, him, his, himself; she, her, her, herself."""
    female = kind in words.FEMALE or (kind not in words.MALE and rng.random() < 0.5)
    return ("she", "her", "her", "herself") if female else ("he", "him", "his", "himself")


def name_for(kind: str, female: bool, friend: bool, rng: random.Random) -> str:
    """Animals often have pet names, people never. Heroes and friends have names of their own, so
    that they are never mixed up."""
    names = (
        words.PETNAMES
        if kind in words.ANIMALS and rng.random() < 0.5
        else words.GIRLS
        if female
        else words.BOYS
    )
    return rng.choice([name for i, name in enumerate(names) if (i % 3 == 0) == friend])


def cast(rng: random.Random) -> Slots:
    """The hero, the friend and everything else that a story may need."""
    kind = (
        rng.choice(words.ANIMALS)
        if rng.random() < 0.72
        else rng.choice(words.PEOPLE + ["girl", "boy"] * 8)
    )
    fkind = rng.choice([a for a in words.ANIMALS if a != kind])
    he, him, his, himself = pronouns(kind, rng)
    fhe, fhim, fhis, _ = pronouns(fkind, rng)
    hero, friend = name_for(kind, he == "she", False, rng), name_for(fkind, fhe == "she", True, rng)
    trait = rng.choice(words.SMALL)
    obj, obj2 = rng.sample(words.THINGS, 2)
    adjective, adjective2 = (rng.choice(words.COLOURS + words.TRAITS) for _ in range(2))
    spot, spot2 = rng.choice(words.SPOTS[::2]), rng.choice(words.SPOTS[1::2])
    fear, fear2 = rng.sample(words.FEARS, 2)
    place = rng.choice(words.PLACES)
    pick = rng.choice
    return {
        "hero": hero,
        "friend": friend,
        "kind": kind,
        "fkind": fkind,
        "he": he,
        "him": him,
        "his": his,
        "himself": himself,
        "fhe": fhe,
        "fhim": fhim,
        "fhis": fhis,
        "trait": trait,
        "a_kind": f"a {trait} {kind}",
        "a_fkind": f"a {fkind}",
        "obj": obj,
        "thing": f"{adjective} {obj}",
        "a_thing": f"a {adjective} {obj}",
        "a_obj": f"a {obj}",
        "instrument": pick(["violin", "flute", "drum", "piano", "guitar", "trumpet", "harp"]),
        "thing2": obj2,
        "a_thing2": f"a {adjective2} {obj2}",
        "spot": spot,
        "spot2": spot2,
        "fear": fear,
        "fear2": fear2,
        "place": place,
        "a_place": f"a {place}",
        "food": pick(words.FOODS),
        "skill": pick(words.SKILLS),
        "sight": pick(words.SIGHTS),
        "seed": pick(words.SEEDS),
        "dish": pick(words.DISHES),
        "game": pick(words.GAMES),
        "colour": pick(words.COLOURS),
        "number": pick(["ten", "twenty", "seven", "twelve", "thirty", "five"]),
    }


ASKS = (
    "tell me a [|short |little |nice |small ]story about {X}.",
    "write a [|short |little |simple |funny ]story about {X}.",
    "can you tell me a story about {X}?",
    "please tell me a [|bedtime |short ]story about {X}.",
    "I would like to hear a story about {X}.",
    "tell a story about {X}.",
    "make up a [|short ]story about {X}.",
    "could you write a [|short |children's ]story about {X}?",
    "a story about {X}, please.",
    "write me a [|bedtime ]story about {X}.",
    "tell me a [bedtime story|fairy tale|tale] about {X}.",
    "do you know a story about {X}?",
    "give me a short story about {X}.",
    "write a [few sentences|short tale|children's story] about {X}.",
    "my [son|daughter|sister|brother] wants a story about {X}.",
    "tell the story of {X}.",
    "I want a story about {X}.",
    "write a story for [children|kids|my little brother|my class] about {X}.",
)
PLAIN_ASKS = (
    "tell me a story.",
    "tell me a short story.",
    "write a bedtime story.",
    "can you tell me a story?",
    "write a short story for children.",
    "I want to hear a story.",
    "tell me a [fairy tale|tale|bedtime story], please.",
)


def subject(plot: Plot, s: Slots, rng: random.Random) -> str:
    """The hero as the prompt names it: sometimes with a trait, a name, a place."""
    form = rng.choice(
        (
            "a {kind}",
            "a {kind}",
            "a {trait} {kind}",
            "a {kind} [named|called] {hero}",
            "a {trait} {kind} [named|called] {hero}",
            "{hero} the {kind}",
        )
    )
    tail = (
        " " + rng.choice(plot.about)
        if rng.random() < 0.93
        else rng.choice((" in a {place}", " who lives in a {place}", ""))
    )
    return say(form + tail, s, rng)


def ask(plot: Plot, s: Slots, rng: random.Random) -> str:
    """The prompt of a story."""
    if rng.random() < 0.03:
        return say(rng.choice(PLAIN_ASKS), s, rng)
    if plot.name in WORDED and rng.random() < 0.15:
        three = [s["kind"], s["obj"], s["place"]]
        rng.shuffle(three)
        return say(
            "[write|tell me|make up] a [|short ]story with the words " + listing(three) + ".",
            s,
            rng,
        )
    about = subject(plot, s, rng)
    about = about if about.startswith(s["hero"]) else about[0].lower() + about[1:]
    return say(rng.choice(ASKS).replace("{X}", about.replace("{", "")), s, rng)


def tell(plot: Plot, s: Slots, rng: random.Random) -> str:
    """The story: opening, the stages of the plot, an ending, now and then a moral or a title."""
    s = s | {"meet": say(rng.choice(FRIENDS), s, rng).removesuffix(".")}
    s["meet"] = (
        s["meet"] if s["meet"].startswith(s["friend"]) else s["meet"][0].lower() + s["meet"][1:]
    )
    parts = [rng.choice(OPENINGS), *(rng.choice(stage) for stage in plot.stages)]
    if rng.random() < 0.7:
        parts.append(rng.choice(ENDINGS))
    if rng.random() < 0.35:
        parts.append(
            "[{hero} had learned|so {hero} learned|{hero} now knew] that "
            + rng.choice(plot.morals)
            + "."
        )
    lines = [say(part, s, rng) for part in parts]
    if rng.random() < 0.5:
        return " ".join(lines)
    cut = rng.randint(2, len(lines) - 2)
    return " ".join(lines[:cut]) + "\n\n" + " ".join(lines[cut:])


def story(rng: random.Random) -> tuple[str, str]:
    """A prompt and its story."""
    plot, slots = rng.choice(PLOTS), cast(rng)
    prompt, name = ask(plot, slots, rng), slots["hero"]
    if name in prompt and rng.random() < 0.5:
        slots["hero"] = words.invented(rng)
        prompt = prompt.replace(name, slots["hero"])
    return prompt, tell(plot, slots, rng)


def continued(rng: random.Random) -> tuple[str, str]:
    """The beginning of a story and the rest of it."""
    plot, s = rng.choice(PLOTS), cast(rng)
    begin, *rest = re.split(
        r"(?<=[.!?]) (?=[A-Z])", tell(plot, s, rng), maxsplit=rng.choice([1, 2, 2, 3])
    )
    begin = " ".join([begin, *rest[:-1]])
    return say(
        "[continue this story|go on with this story|finish this story|how does this story go "
        "on|write the rest of this story]: ",
        s,
        rng,
    ) + begin, rest[-1]


def plain(rng: random.Random) -> str:
    """A story without a prompt, with a title."""
    plot, s = rng.choice(PLOTS), cast(rng)
    title = rng.choice(
        (
            f"{s['hero']} and {s['friend']}",
            f"The {s['kind']} and the {s['obj']}",
            f"{s['hero']} the {s['kind']}",
            f"The {s['trait']} {s['kind']}",
        )
    )
    return sentences(articles(title)) + "\n\n" + tell(plot, s, rng)
