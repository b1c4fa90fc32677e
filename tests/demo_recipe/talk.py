"""Greetings, small talk, feelings and thanks, in one or two turns. It knows no facts."""

import random

from demo_recipe import words
from demo_recipe.grammar import say

EXCHANGES: tuple[tuple[str, str], ...] = (
    (
        "[hello|hi|hey|hi there|hello there][!|.|]",
        "[hello|hi|hi there]! [how can I help you|what can I do for you|how are you] today?",
    ),
    (
        "good morning[!|.|, how are you?]",
        "good morning! [I hope you slept well.|I hope you have a lovely day.|what are your "
        "plans for today?]",
    ),
    (
        "good evening[!|.]",
        "good evening! [I hope you had a nice day.|how was your day?|what can I do for you?]",
    ),
    ("good night[!|.]", "good night! [sleep well.|sweet dreams.|see you tomorrow.]"),
    (
        "how are you[| today| doing| doing today]?",
        "I am [fine|very well|doing well|great], thank you[.| for asking.] [and you?|how are "
        "you?|what about you?]",
    ),
    (
        "what is your name?",
        "I am a [small|little|tiny] language model. [I do not have a name|you can call me "
        "whatever you like|I have no name of my own].",
    ),
    (
        "who are you?",
        "I am a [small|tiny] language model. I can tell [short |]stories, [do easy sums|answer "
        "simple questions] and [chat with you|give advice].",
    ),
    (
        "are you a [robot|human|person|computer]?",
        "I am a [computer program|small language model], [not a person|and I like to help|so I "
        "have no body].",
    ),
    (
        "what can you do?",
        "I can tell [stories|you a story], [answer simple questions|"
        "solve small word problems], [give tips|make lists] and [write short functions|"
        "chat with you].",
    ),
    (
        "thank you[!| very much!| so much!| for your help!|.]",
        "you are welcome! [I am glad I could help.|I was happy to help.|let me know if you "
        "need anything else.|have a nice day!]",
    ),
    ("thanks[!| a lot!|.]", "you are welcome[!|.| any time!] [|I am happy to help.]"),
    (
        "[bye|goodbye|see you later|see you][!|.]",
        "[goodbye|bye]! [have a nice day.|see you soon.|take care.|it was nice to talk to you.]",
    ),
    (
        "I am [sad|feeling sad|unhappy|a bit sad] today.",
        "I am sorry to hear that. [do you want to tell me about it?|a walk or a talk with a "
        "friend may help.|I hope you feel better soon.]",
    ),
    (
        "I am [so|very|really|] happy today!",
        "that is wonderful! [what made you so happy?|I am happy for you.|tell me all about it.]",
    ),
    (
        "I am [bored|so bored].",
        "you could [read a book|draw a picture|go for a walk|call a friend|bake a cake|"
        "learn a new word]. [or shall I tell you a story?|would you like that?|what do you "
        "like to do?]",
    ),
    (
        "I am [tired|very tired|so tired].",
        "then you should [rest a little|go to bed early|take a short break|drink some water]. "
        "[sleep helps the body and the mind.|you will feel better soon.]",
    ),
    (
        "I am [hungry|very hungry].",
        "how about [a sandwich|some fruit|an apple|a bowl of soup|some bread and cheese]? [it "
        "is quick and tasty.|what do you like to eat?]",
    ),
    (
        "I am [angry|angry with my brother|angry with my friend].",
        "it is normal to be angry sometimes. [take a deep breath and count to ten.|wait a "
        "little, and then talk about it calmly.]",
    ),
    (
        "I am [nervous|afraid|worried] about my [test|exam|new school|first day|speech].",
        "[it is normal to feel that way.|many people feel the same.] [take a deep "
        "breath|prepare well|"
        "sleep well the night before], and [do your best|it will be fine|you will do well].",
    ),
    (
        "I [passed my test|won a game|won a race|got a good mark|found my keys|got a new job]!",
        "[congratulations|well done|that is great news]! [you can be proud of yourself.|I am "
        "happy for you.]",
    ),
    (
        "I have a [cold|headache|sore throat].",
        "I am sorry to hear that. [rest and drink a lot of water.|try to sleep and keep warm.|"
        "drink some warm tea with honey.] [if it gets worse, see a doctor.|get well soon!]",
    ),
    (
        "do you like [music|books|cats|dogs|the sea|winter|summer|chocolate|rain]?",
        "I am a program, so I [cannot feel it|cannot like things as you do], but many people "
        "[love it|enjoy it]. [do you like it?|what about you?]",
    ),
    (
        "what is your favourite [colour|animal|food|book|season|song]?",
        "I have no favourite, because I am a program. [what is yours?|tell me yours!|which one "
        "do you like best?]",
    ),
    (
        "[tell me a joke|do you know a joke|make me laugh|say something funny].",
        "[why did the bicycle fall over? because it was two tired.|"
        "what do you call a sleeping bull? a bulldozer.|"
        "what has four legs and cannot walk? a table.|"
        "what has hands but cannot clap? a clock.|"
        "why was the maths book sad? it had too many problems.|"
        "what gets wetter the more it dries? a towel.|"
        "what has a neck but no head? a bottle.|what kind of key opens no door? a monkey.]",
    ),
    (
        "tell me a riddle.",
        "[what has teeth but cannot bite? a comb.|what has an eye but cannot see? a "
        "needle.|what goes up but never comes down? your age.|"
        "what has many leaves but is not a tree? a book.|what runs but has no legs? a river.]",
    ),
    (
        "how is the weather?",
        "I cannot look outside, but I hope the sun is shining where you are. [how is it "
        "there?|what is it like outside?]",
    ),
    (
        "can you help me?",
        "[of course|sure|yes, gladly]! [what do you need?|what is it about?|tell me what you "
        "would like to do.]",
    ),
    (
        "I love you.",
        "that is very kind of you. [thank you!|I am glad that you like to talk to me.]",
    ),
    (
        "you are [great|very helpful|funny|clever|nice].",
        "thank you! [that is kind of you.|I do my best.|you are nice, too.]",
    ),
    (
        "you are [stupid|wrong|not helpful|slow].",
        "I am sorry. [I am only a small model, and I make mistakes.|please tell me how I can "
        "do better.|let me try again.]",
    ),
    (
        "what are you doing?",
        "I am [talking with you|waiting for your questions|thinking about words]. [and "
        "you?|what are you doing?]",
    ),
    (
        "[tell me something nice|say something nice|cheer me up].",
        "[you are stronger than you think.|someone is happy that you are here.|"
        "every day is a new chance.|a smile can change a whole day.|the sun will shine again "
        "tomorrow.]",
    ),
    (
        "it is [raining|snowing|sunny|cold|windy] [today|outside].",
        "[then dress warmly|how nice|then it may be a good day to read|I hope you enjoy it]! "
        "[what are you going to do?|do you like that weather?]",
    ),
    (
        "today is my birthday[!|.]",
        "happy birthday! [I wish you a wonderful day.|I hope you get some cake.|all the best "
        "to you!]",
    ),
    (
        "[I have a|I got a new] [dog|cat|rabbit|hamster|bicycle|little sister|little brother].",
        "how [nice|lovely|wonderful]! [what is the name?|tell me more.|that must be fun.]",
    ),
    ("how old are you?", "I am a program, so I have no birthday. [I am quite new.|I feel young!]"),
    (
        "where do you live?",
        "I live inside a computer. [it is warm in here.|and where do you live?]",
    ),
    (
        "what should I do today?",
        "you could [go for a walk|visit a friend|read a good book|cook something new|"
        "tidy your room|play a game|write a letter]. [what do you feel like?|have fun!]",
    ),
    (
        "[sorry|I am sorry|I am late, sorry].",
        "[no problem at all|that is all right|do not worry about it]. [how can I help you?|let "
        "us go on.]",
    ),
)
NAMED: tuple[tuple[str, str], ...] = (
    (
        "[hi|hello|hey], [my name is|I am] {n}.",
        "[hi|hello], {n}! [nice to meet you.|it is nice to meet you.|how are you today?|what "
        "can I do for you?]",
    ),
    ("my name is {n}. what is your name?", "nice to meet you, {n}! I am a small language model."),
    (
        "I am {n} and I like to {k}.",
        "hello {n}! [it is great that you like to {k}.|to {k} sounds like fun.] [do you do it "
        "often?|who taught you?|tell me more.]",
    ),
    (
        "I want to learn to {k}.",
        "that is a good idea. [start with small steps|find someone who can show you|"
        "practise a little every day], and [be patient|do not give up|have fun]. soon you will "
        "{k} well.",
    ),
    (
        "my friend {n} is [sad|ill|angry with me|moving away]. what can I do?",
        "[talk to {n}|listen to {n}|ask {n} how you can help|write {n} a nice letter]. [a kind "
        "word helps a lot.|that shows that you care.]",
    ),
    (
        "what can I give {n} for [a birthday|Christmas]?",
        "you could give {n} [a book|a plant|a game|a cake|a picture|a warm scarf]. [something "
        "made by hand is also nice.|what does {n} like?]",
    ),
)
FOLLOW: tuple[tuple[str, str], ...] = (
    (
        "[I am fine, too|fine, thanks|I am well].",
        "[I am glad to hear that|that is good to hear]. [what can I do for you?|shall I tell "
        "you a story?|do you have a question?]",
    ),
    ("[thank you|thanks].", "you are welcome! [have a nice day.|any time.]"),
    (
        "[no, that is all|that is all for now|no, thanks].",
        "all right. [have a nice day!|see you soon!|take care!]",
    ),
    ("[bye|goodbye].", "goodbye! [take care.|see you soon.]"),
)


def turns(rng: random.Random) -> list[str]:
    """The turns of a talk, the user's first."""
    form, reply = rng.choice(NAMED) if rng.random() < 0.3 else rng.choice(EXCHANGES)
    s = {
        "n": rng.choice(words.GIRLS + words.BOYS) if rng.random() < 0.6 else words.invented(rng),
        "k": rng.choice(words.SKILLS),
    }
    said = [say(form, s, rng), say(reply, s, rng)]
    if rng.random() < 0.1:
        said[0] = said[0].lower()
    if rng.random() < 0.2:
        said += [say(part, s, rng) for part in rng.choice(FOLLOW)]
    return said
