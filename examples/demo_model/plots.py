"""Hold the plots of the stories: the events in order and the lesson, in the grammar of `grammar.expand`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """A chain of causes; the slots are those of `stories.story`."""

    text: str
    moral: str
    weather: str | None = None
    """The only weather it can happen in."""
    about_thing: bool = False
    """It has a thing at its centre, so it serves a story that is asked about one."""


PLOTS = {
    "lost": Plot(
        """{hero} [was playing with|was carrying] a {colour} {thing} near {place2} [when|, and then] {accident}. [{he}
looked for it [everywhere|under every bush|until noon], but it was [gone|nowhere to be seen].|Now the
{thing} was gone.] {hero} [began to cry|felt very sad|sat down and sighed]. {friend}, a {kind2}, [heard
{him}|came by|saw {him}] and asked, "[What is wrong|Why are you so sad], {hero}?" "I [have lost|lost] my
{thing}," said {hero}. "[Do not worry|Come], [we can look|let us search] together," said {friend}. [They
walked back to {place2} and looked [again|once more].|So the two of them went back, step by step.] [At
last|After a while], {friend} [saw|spotted] something {colour} [behind a stone|in the tall grass|high in a
tree]. It was the {thing}! {hero} [jumped with joy|laughed| hugged {friend}] [because|, for] the {thing} was
[safe|back|not broken].""",
        "[two pairs of eyes are better than one|a friend makes every search shorter]",
        about_thing=True,
    ),
    "help": Plot(
        """On the way to {place2}, {hero} [met|saw] {friend}, a {kind2} who [had hurt a foot|was carrying a heavy
{thing}| was stuck in the mud]. [{hero} was in a hurry, but {he} stopped.|{hero} could have walked on, but
{he} did not.] "[Can|May] I help you?" asked {hero}. "Yes, please," said {friend}. "I [cannot do this
alone|have been here for hours]." [It was hard work|It took a long time], [and soon both of them were
tired|but {hero} did not give up]. When it was done, {friend} [thanked {him}|smiled]. The next day {hero}
[lost {his} {thing2}|fell into a ditch|could not find the way home], and who came to help? It was {friend},
[because|for] {friend} had not forgotten.""",
        "[kindness comes back|help given is never lost]",
    ),
    "storm": Plot(
        """{hero} and {friend}, a {kind2}, were [at|near] {place2} when the sky [turned dark|became black]. [Soon|A
moment later] there was [thunder|a flash of lightning], and {friend} was [afraid|so scared that {friend}
could not move]. [{hero} was afraid too, but {he} took {friend} by the hand|"Stay close to me," said
{hero}]. They [ran to|hid in] [a cave|an old shed|a hollow tree], [where it was dry|and there they waited].
To pass the time, {hero} [sang a song| told a story about a {thing}|counted to one hundred]. [Little by
little|After an hour], the storm [moved away|grew quiet]. [Because they had stayed together|Because {hero}
had kept calm], [nobody was hurt|both of them were safe]. Over {place2} there was a [bright|wide] rainbow.""",
        "[fear is smaller when you share it|every storm ends]",
        weather="rainy",
    ),
    "seed": Plot(
        """{friend}, a wise {kind2}, gave {hero} a [tiny|small brown] seed. "[Give it water every day|Look after it],"
said {friend}, "and wait." {hero} [planted|put] the seed in the ground near {place2}. [On the first day
nothing happened.| For a week there was nothing to see.] {hero} [wanted to give up|was a little angry], but
{he} [watered it all the same| kept {his} promise]. [When the rain stopped for a month, {hero} carried water
from the river.|When the nights were cold, {hero} covered it with straw.] Then [one morning|at last] a
[green leaf|small stem] came out, and in the summer there [was a tall flower|was a bush full of {colour}
berries]. {hero} [gave half of it to {friend}|showed it to {friend}], who was [very proud|very pleased].""",
        "[good things need time|patience makes things grow]",
    ),
    "noise": Plot(
        """Every night a strange [noise|sound] came from {place2}. [tap, tap, tap, it went|It went boom, boom, boom].
[Nobody wanted to go near.|Some said that it was a ghost.] But {hero} [wanted to know|could not sleep], so
{he} took a [lamp|{thing}] and went to look. {his} heart was beating fast. [behind the door|In the dark]
{he} found [only|just] {friend}, a {kind2}, who was [building a {thing2}|learning to play the drum|mending a
{thing2}]. "[Sorry|Oh dear]! Did I wake you?" asked {friend}. "I [work at night because the days are too
hot|wanted it to be a surprise]." {hero} laughed [because|, for] there was nothing to fear. [The next
day|Soon] they [finished the work together|told everyone], and {place2} was quiet again.""",
        "[it is better to look than to be afraid|most ghosts are only friends you have not met]",
    ),
    "share": Plot(
        """{hero} had [a big cake|a basket of {colour} apples|a pot of soup], and {he} wanted to [eat|keep] it all.
[Then|Just then] {friend}, a {kind2}, came by. {friend} [looked thin|had not eaten all day|was cold and
hungry]. {hero} [thought for a moment|looked at the food and then at {friend}]. "[There is enough for
two|Come and sit with me]," {he} said [at last|with a smile]. They ate together [by the fire|under a tree]
near {place2} and [talked until it was dark|told each other jokes]. {friend} was so [grateful|happy] that
{he2} gave {hero} a {colour} {thing}. {hero} had [less food|a smaller meal], but {he} [was happier than
before|had a new friend].""",
        "[food tastes better when it is shared|a small half is better than a lonely whole]",
    ),
    "learn": Plot(
        """{hero} wanted to [learn to swim|ride a bicycle|paint a picture of {place2}|play the flute], but [it was not
easy|everything went wrong]. [{he} tried once, and {he} failed. {he} tried again, and it was even worse.|The
first day was bad, and the second day was no better.] "I [will never do it|am not good at anything]," said
{hero}, and {he} threw {his} {thing} on the ground. {friend}, a {kind2}, [picked it up|gave it back]. "I
failed [ten|twenty|a hundred] times [before I could do it|when I was young]," {he2} said. [So {hero} tried
every day.|So they practised together each morning.] [Slowly|Week by week] it [became easier|went better],
and [in the spring|one day] {he} [could do it|did it] without any help. {friend} [clapped|cheered] so loudly
that [the birds flew up|everyone near {place2} came to look].""",
        "[we learn by trying again|nobody is good at the start]",
    ),
    "gift": Plot(
        """It was the birthday of {friend}, a {kind2}, and {hero} had no [money|gift]. [All day|For hours] {he} [walked
around {place2}|sat near {place2}] and thought. Then {he} found an old {thing}. It was [dirty|broken], so
{he} [washed it| mended it] and painted it {colour}. "It is not new," said {hero} [softly|at the party],
"but I made it for you." {friend} [looked at it for a long time|held the {thing} in both hands]. "[Nobody
has ever made something for me|This is the best gift of all]," {he2} said. [Everyone clapped.|They danced
until late.] To this day the {colour} {thing} stands [by the window|next to the bed] of {friend}.""",
        "[a gift is as big as the care in it|what we make with love is never poor]",
        about_thing=True,
    ),
    "swap": Plot(
        """{hero} had a {colour} {thing}, and {friend}, a {kind2}, had a {thing2}. [{hero} thought that the {thing2}
was nicer|Both of them were bored], so they [swapped|made a trade] near {place2}. [For a day|At first]
{hero} was happy. But [at night|the next morning] {he} missed the {thing}, because [it had been with {him}
for years|it was a present from home]. {hero} [walked|ran] back [through the rain|in the early light], and
on the road {he} met {friend}, who was coming [the other way|to find {him}]. "[I miss my {thing2}|Can we
swap back]?" asked {friend}. They [looked at each other|both laughed] and gave the things back.""",
        "[what we have is often what we want|you see what a thing is worth when it is gone]",
        about_thing=True,
    ),
    "bridge": Plot(
        """The bridge to {place2} was [old|broken], and nobody [could cross|dared to cross] it. {hero} [wanted to
visit| had to bring bread to] {friend}, a {kind2} on the other side. "[I cannot build a bridge alone|This is
too much for me]," said {hero}. [{he} called all the neighbours|{he} knocked at every door], and each of
them brought [one stone|one board]. {friend} [worked from the other side|held the rope]. [On the third
day|Before the winter came], the two ends met in the middle. [Because everyone had carried a little|Because
nobody had stayed at home], nobody had to carry much. {hero} was the first to walk over, and {friend}
[waved|cheered].""",
        "[many hands make a bridge|a big work is many small ones]",
    ),
}
