"""Names and word lists that several families draw from."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MONTHS = _words("January February March April May June July August September October November December")
NAMES = _words(
    "Amina Ben Carla Daniel Elena Farid Grace Hugo Ines Jonas Keiko Liam Maria Nadia Omar Priya Quinn Rosa Samuel Tara "
    "Umar Vera Wei Ximena Yusuf Zoe Anders Bianca Chen Dario Emeka Freya Gloria Hassan Irene Jamal Kofi Lucia Marek "
    "Nora"
)
SURNAMES = _words(
    "Adler Baker Costa Diaz Evans Fischer Garcia Hughes Ito Jansen Kaya Lopez Moreau Novak Okoye Patel Rossi Silva "
    "Tanaka Weber"
)
CITIES = _words(
    "Lisbon Oslo Nairobi Lima Hanoi Prague Dublin Cairo Toronto Seoul Athens Bogota Vienna Accra Helsinki Jakarta "
    "Madrid Santiago Warsaw Tunis Denver Osaka Porto Turin Leeds Lyon Perth Quito"
)
GOODS = (
    ("notebooks", 2, 9),
    ("pencils", 1, 3),
    ("chairs", 25, 80),
    ("lamps", 15, 60),
    ("tickets", 8, 45),
    ("shirts", 12, 40),
    ("books", 6, 30),
    ("plants", 4, 25),
    ("mugs", 5, 15),
    ("batteries", 2, 8),
    ("candles", 3, 12),
    ("cushions", 9, 28),
    ("boxes of tea", 3, 11),
    ("bags of rice", 4, 19),
    ("jars of honey", 5, 14),
    ("bottles of oil", 6, 22),
)
PLACES = ("garden", "playground", "field", "courtyard", "parking lot", "swimming pool", "classroom", "terrace")

# Word -> one near synonym and one opposite; both common enough to be undisputed.
ADJECTIVES = (
    ("happy", "cheerful", "sad"),
    ("big", "large", "small"),
    ("fast", "quick", "slow"),
    ("smart", "clever", "foolish"),
    ("angry", "furious", "calm"),
    ("brave", "courageous", "cowardly"),
    ("cold", "chilly", "hot"),
    ("rich", "wealthy", "poor"),
    ("easy", "simple", "difficult"),
    ("quiet", "silent", "loud"),
    ("strong", "sturdy", "weak"),
    ("tired", "weary", "rested"),
    ("kind", "generous", "cruel"),
    ("clean", "spotless", "dirty"),
    ("strange", "odd", "ordinary"),
    ("old", "ancient", "new"),
    ("bright", "shining", "dim"),
    ("safe", "secure", "dangerous"),
    ("honest", "truthful", "deceitful"),
    ("empty", "vacant", "full"),
    ("wide", "broad", "narrow"),
    ("polite", "courteous", "rude"),
    ("famous", "renowned", "unknown"),
    ("tiny", "minute", "huge"),
    ("correct", "right", "wrong"),
    ("wet", "damp", "dry"),
    ("careful", "cautious", "reckless"),
    ("scarce", "rare", "plentiful"),
    ("eager", "keen", "reluctant"),
    ("rigid", "stiff", "flexible"),
    ("brief", "short", "lengthy"),
    ("fragile", "delicate", "tough"),
)

# Base, past, third person, -ing form, participle, an object that fits.
VERBS = (
    ("write", "wrote", "writes", "writing", "written", "a letter"),
    ("eat", "ate", "eats", "eating", "eaten", "an apple"),
    ("build", "built", "builds", "building", "built", "a shed"),
    ("sing", "sang", "sings", "singing", "sung", "a song"),
    ("drive", "drove", "drives", "driving", "driven", "the truck"),
    ("teach", "taught", "teaches", "teaching", "taught", "the class"),
    ("buy", "bought", "buys", "buying", "bought", "fresh bread"),
    ("draw", "drew", "draws", "drawing", "drawn", "a map"),
    ("break", "broke", "breaks", "breaking", "broken", "the window"),
    ("find", "found", "finds", "finding", "found", "the key"),
    ("catch", "caught", "catches", "catching", "caught", "a fish"),
    ("sell", "sold", "sells", "selling", "sold", "the house"),
    ("choose", "chose", "chooses", "choosing", "chosen", "a color"),
    ("paint", "painted", "paints", "painting", "painted", "the fence"),
    ("wash", "washed", "washes", "washing", "washed", "the dishes"),
    ("carry", "carried", "carries", "carrying", "carried", "the bag"),
    ("fix", "fixed", "fixes", "fixing", "fixed", "the bicycle"),
    ("bake", "baked", "bakes", "baking", "baked", "a cake"),
    ("open", "opened", "opens", "opening", "opened", "the door"),
    ("study", "studied", "studies", "studying", "studied", "the report"),
    ("read", "read", "reads", "reading", "read", "the news"),
    ("wear", "wore", "wears", "wearing", "worn", "a coat"),
    ("clean", "cleaned", "cleans", "cleaning", "cleaned", "the kitchen"),
    ("plan", "planned", "plans", "planning", "planned", "the trip"),
)

NOUNS = (
    ("child", "children"),
    ("mouse", "mice"),
    ("city", "cities"),
    ("leaf", "leaves"),
    ("tooth", "teeth"),
    ("box", "boxes"),
    ("knife", "knives"),
    ("person", "people"),
    ("church", "churches"),
    ("sheep", "sheep"),
    ("goose", "geese"),
    ("baby", "babies"),
    ("hero", "heroes"),
    ("wolf", "wolves"),
    ("bus", "buses"),
    ("woman", "women"),
    ("foot", "feet"),
    ("party", "parties"),
    ("shelf", "shelves"),
    ("dish", "dishes"),
    ("ox", "oxen"),
    ("crisis", "crises"),
    ("story", "stories"),
    ("potato", "potatoes"),
)

CATEGORIES = {
    "fruit": _words("apple banana cherry mango orange peach pear plum grape melon apricot fig"),
    "vegetable": _words("carrot spinach broccoli onion cabbage celery turnip leek kale radish"),
    "mammal": _words("dog whale bat horse tiger dolphin rabbit elephant bear mouse"),
    "bird": _words("eagle penguin sparrow owl parrot ostrich swan crow falcon robin"),
    "instrument": _words("violin piano flute drum guitar trumpet cello harp oboe clarinet"),
    "tool": _words("hammer wrench saw drill chisel pliers screwdriver shovel axe rake"),
    "vehicle": _words("car truck bicycle tram scooter bus van train motorcycle tractor"),
    "metal": _words("iron copper gold silver zinc tin lead nickel aluminum titanium"),
    "color": _words("red blue green yellow purple brown pink gray black white"),
    "clothing": _words("shirt scarf jacket sock glove hat skirt sweater coat belt"),
    "profession": _words("nurse baker pilot teacher lawyer plumber farmer dentist carpenter judge"),
    "furniture": _words("table chair sofa desk bed shelf wardrobe bench stool cabinet"),
}

# Country, capital, continent, currency, an official language, population band for "larger" questions is left out on
# purpose.
COUNTRIES = (
    ("France", "Paris", "Europe", "euro", "French"),
    ("Japan", "Tokyo", "Asia", "yen", "Japanese"),
    ("Kenya", "Nairobi", "Africa", "Kenyan shilling", "Swahili"),
    ("Brazil", "Brasilia", "South America", "real", "Portuguese"),
    ("Canada", "Ottawa", "North America", "Canadian dollar", "English"),
    ("India", "New Delhi", "Asia", "Indian rupee", "Hindi"),
    ("Egypt", "Cairo", "Africa", "Egyptian pound", "Arabic"),
    ("Norway", "Oslo", "Europe", "Norwegian krone", "Norwegian"),
    ("Mexico", "Mexico City", "North America", "Mexican peso", "Spanish"),
    ("Poland", "Warsaw", "Europe", "zloty", "Polish"),
    ("Australia", "Canberra", "Oceania", "Australian dollar", "English"),
    ("Peru", "Lima", "South America", "sol", "Spanish"),
    ("Thailand", "Bangkok", "Asia", "baht", "Thai"),
    ("Turkey", "Ankara", "Asia", "Turkish lira", "Turkish"),
    ("Ghana", "Accra", "Africa", "cedi", "English"),
    ("Portugal", "Lisbon", "Europe", "euro", "Portuguese"),
    ("Sweden", "Stockholm", "Europe", "Swedish krona", "Swedish"),
    ("Argentina", "Buenos Aires", "South America", "Argentine peso", "Spanish"),
    ("Vietnam", "Hanoi", "Asia", "dong", "Vietnamese"),
    ("Morocco", "Rabat", "Africa", "dirham", "Arabic"),
    ("Italy", "Rome", "Europe", "euro", "Italian"),
    ("Germany", "Berlin", "Europe", "euro", "German"),
    ("Spain", "Madrid", "Europe", "euro", "Spanish"),
    ("Greece", "Athens", "Europe", "euro", "Greek"),
    ("Hungary", "Budapest", "Europe", "forint", "Hungarian"),
    ("Finland", "Helsinki", "Europe", "euro", "Finnish"),
    ("Chile", "Santiago", "South America", "Chilean peso", "Spanish"),
    ("Nigeria", "Abuja", "Africa", "naira", "English"),
    ("South Korea", "Seoul", "Asia", "won", "Korean"),
    ("China", "Beijing", "Asia", "yuan", "Mandarin Chinese"),
    ("Ethiopia", "Addis Ababa", "Africa", "birr", "Amharic"),
    ("Iceland", "Reykjavik", "Europe", "Icelandic krona", "Icelandic"),
    ("Denmark", "Copenhagen", "Europe", "Danish krone", "Danish"),
    ("Czechia", "Prague", "Europe", "Czech koruna", "Czech"),
    ("Nepal", "Kathmandu", "Asia", "Nepalese rupee", "Nepali"),
    ("Mongolia", "Ulaanbaatar", "Asia", "tugrik", "Mongolian"),
    ("Cuba", "Havana", "North America", "Cuban peso", "Spanish"),
    ("New Zealand", "Wellington", "Oceania", "New Zealand dollar", "English"),
    ("Austria", "Vienna", "Europe", "euro", "German"),
    ("Romania", "Bucharest", "Europe", "leu", "Romanian"),
    ("Indonesia", "Jakarta", "Asia", "rupiah", "Indonesian"),
    ("Colombia", "Bogota", "South America", "Colombian peso", "Spanish"),
    ("Tunisia", "Tunis", "Africa", "Tunisian dinar", "Arabic"),
    ("Jordan", "Amman", "Asia", "Jordanian dinar", "Arabic"),
)

ELEMENTS = (
    ("hydrogen", "H", 1),
    ("helium", "He", 2),
    ("lithium", "Li", 3),
    ("carbon", "C", 6),
    ("nitrogen", "N", 7),
    ("oxygen", "O", 8),
    ("fluorine", "F", 9),
    ("neon", "Ne", 10),
    ("sodium", "Na", 11),
    ("magnesium", "Mg", 12),
    ("aluminum", "Al", 13),
    ("silicon", "Si", 14),
    ("phosphorus", "P", 15),
    ("sulfur", "S", 16),
    ("chlorine", "Cl", 17),
    ("argon", "Ar", 18),
    ("potassium", "K", 19),
    ("calcium", "Ca", 20),
    ("titanium", "Ti", 22),
    ("chromium", "Cr", 24),
    ("iron", "Fe", 26),
    ("cobalt", "Co", 27),
    ("nickel", "Ni", 28),
    ("copper", "Cu", 29),
    ("zinc", "Zn", 30),
    ("bromine", "Br", 35),
    ("silver", "Ag", 47),
    ("tin", "Sn", 50),
    ("iodine", "I", 53),
    ("tungsten", "W", 74),
    ("platinum", "Pt", 78),
    ("gold", "Au", 79),
    ("mercury", "Hg", 80),
    ("lead", "Pb", 82),
    ("radon", "Rn", 86),
    ("uranium", "U", 92),
)
