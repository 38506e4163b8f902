"""Explanations, tips and steps that the knowledge families combine."""

from __future__ import annotations

# Term -> (what it is, how or why, an example). One, two or three of them answer a question.
CONCEPTS = {
    "photosynthesis": (
        "Photosynthesis is how plants turn sunlight into sugar.",
        "Leaves take in carbon dioxide and water and release oxygen.",
        "A houseplant on a sunny sill does it all day.",
    ),
    "gravity": (
        "Gravity is the pull between objects that have mass.",
        "The more mass and the less distance, the stronger the pull.",
        "It keeps the Moon in orbit around the Earth.",
    ),
    "inflation": (
        "Inflation is a general rise in prices over time.",
        "It happens when demand or costs grow faster than supply.",
        "Bread that cost one dollar now costs two.",
    ),
    "evaporation": (
        "Evaporation is a liquid turning into vapor.",
        "Fast molecules escape from the surface and carry heat away.",
        "Wet laundry dries in the wind.",
    ),
    "democracy": (
        "Democracy is government chosen by the people.",
        "Citizens vote, and leaders must answer to them.",
        "A town elects its mayor every four years.",
    ),
    "recycling": (
        "Recycling turns waste into new material.",
        "It saves raw material and keeps landfills small.",
        "Old bottles become new glass.",
    ),
    "erosion": (
        "Erosion is the wearing away of soil and rock.",
        "Wind, water and ice carry the pieces off.",
        "A river slowly cuts a valley.",
    ),
    "osmosis": (
        "Osmosis is water moving through a membrane.",
        "It flows to the side with more dissolved salt or sugar.",
        "Raisins swell when left in water.",
    ),
    "friction": (
        "Friction is the force that resists sliding.",
        "Rough surfaces catch on each other and turn motion into heat.",
        "Brakes slow a bicycle by friction.",
    ),
    "compound interest": (
        "Compound interest is interest paid on interest.",
        "Each period's gain is added to the sum that earns the next.",
        "At 10 percent, 100 becomes 121 after two years.",
    ),
    "natural selection": (
        "Natural selection is the survival of helpful traits.",
        "Animals that fit their surroundings have more young.",
        "Pale moths thrive on pale bark.",
    ),
    "supply and demand": (
        "Supply and demand set the price of goods.",
        "Prices rise when buyers want more than sellers offer.",
        "Umbrellas cost more on rainy days.",
    ),
    "a solar eclipse": (
        "A solar eclipse is the Moon covering the Sun.",
        "It happens when Sun, Moon and Earth line up.",
        "For minutes the day turns dark.",
    ),
    "a metaphor": (
        "A metaphor calls one thing another.",
        "It carries a quality over without the word like.",
        "Time is a thief is a metaphor.",
    ),
    "a simile": (
        "A simile compares two things with like or as.",
        "It makes a description vivid.",
        "Her smile was like the sun.",
    ),
    "machine learning": (
        "Machine learning lets computers learn from data.",
        "A model adjusts its numbers until its predictions fit examples.",
        "Spam filters learn from marked mail.",
    ),
    "encryption": (
        "Encryption turns a message into a code.",
        "Only a person with the key can read it.",
        "Banks encrypt card numbers.",
    ),
    "a vaccine": (
        "A vaccine trains the body against a disease.",
        "It shows the immune system a harmless part of the germ.",
        "The measles vaccine protects children.",
    ),
    "the water cycle": (
        "The water cycle moves water between sea, air and land.",
        "It evaporates, forms clouds and falls as rain.",
        "Rain on a hill returns to the sea by river.",
    ),
    "a budget": (
        "A budget is a plan for money.",
        "It sets what comes in against what goes out.",
        "Rent first, then food, then savings.",
    ),
    "teamwork": (
        "Teamwork is people working toward one goal.",
        "Tasks are shared, so each does what they do best.",
        "A crew sails a ship that one could not.",
    ),
    "an algorithm": (
        "An algorithm is a list of steps that solves a problem.",
        "Each step is clear enough to follow without guessing.",
        "A recipe is an algorithm for a cake.",
    ),
    "a food chain": (
        "A food chain shows who eats whom.",
        "Energy passes from plants to grazers to hunters.",
        "Grass feeds a rabbit, which feeds a fox.",
    ),
    "biodiversity": (
        "Biodiversity is the variety of life in a place.",
        "Many species make an ecosystem more stable.",
        "A coral reef holds thousands of species.",
    ),
    "insulation": (
        "Insulation slows the flow of heat.",
        "Trapped air carries warmth poorly.",
        "A wool coat keeps a walker warm.",
    ),
    "magnetism": (
        "Magnetism is the force of magnets and moving charges.",
        "Like poles repel and unlike poles attract.",
        "A compass needle points north.",
    ),
    "a tax": (
        "A tax is money paid to the state.",
        "It pays for roads, schools and care.",
        "A part of each wage goes to income tax.",
    ),
    "peer review": (
        "Peer review is experts checking a study.",
        "They look for errors before it is published.",
        "A journal sends a paper to two reviewers.",
    ),
    "opportunity cost": (
        "Opportunity cost is what you give up by choosing.",
        "Time or money can be used only once.",
        "An evening of work costs a film.",
    ),
    "condensation": (
        "Condensation is vapor turning into liquid.",
        "It happens when moist air meets a cold surface.",
        "Drops form on a cold glass.",
    ),
    "a habit": (
        "A habit is an action done without much thought.",
        "Repeating it after the same cue makes it automatic.",
        "Tea after breakfast can be a habit.",
    ),
    "a renewable resource": (
        "A renewable resource grows back or never runs out.",
        "It is refilled as fast as it is used.",
        "Wind and sunlight are renewable.",
    ),
    "plate tectonics": (
        "Plate tectonics is the slow motion of the Earth's crust.",
        "Plates drift, collide and pull apart.",
        "Mountains rise where two plates meet.",
    ),
    "a balanced diet": (
        "A balanced diet gives the body all it needs.",
        "It mixes grains, protein, fruit and vegetables.",
        "Rice, beans and salad make a good plate.",
    ),
    "empathy": (
        "Empathy is feeling what another person feels.",
        "It grows by listening and asking.",
        "A friend sits with you when you are sad.",
    ),
    "a hypothesis": (
        "A hypothesis is a guess that can be tested.",
        "An experiment shows whether it holds.",
        "Plants grow faster in red light is one.",
    ),
}

TIPS = {
    "sleeping better": (
        "Keep a regular bedtime.",
        "Avoid screens at night.",
        "Drink no coffee after noon.",
        "Keep the room cool and dark.",
        "Read before bed.",
        "Get daylight in the morning.",
    ),
    "saving money": (
        "Write down what you spend.",
        "Cook at home.",
        "Cancel unused subscriptions.",
        "Compare prices.",
        "Save first, spend later.",
        "Repair before you replace.",
    ),
    "staying healthy": (
        "Walk every day.",
        "Eat more vegetables.",
        "Drink enough water.",
        "Sleep eight hours.",
        "Wash your hands.",
        "See a doctor once a year.",
    ),
    "learning a language": (
        "Practice daily.",
        "Listen to songs.",
        "Label things at home.",
        "Speak with natives.",
        "Read short stories.",
        "Keep a word list.",
    ),
    "a job interview": (
        "Research the company.",
        "Arrive early.",
        "Dress neatly.",
        "Prepare examples.",
        "Ask good questions.",
        "Send a thank-you note.",
    ),
    "studying for an exam": (
        "Make a timetable.",
        "Test yourself.",
        "Take short breaks.",
        "Explain it to a friend.",
        "Start early.",
        "Sleep before the exam.",
    ),
    "growing tomatoes": (
        "Choose a sunny spot.",
        "Water the soil, not the leaves.",
        "Tie the stems to stakes.",
        "Feed them weekly.",
        "Pick off side shoots.",
        "Protect them from frost.",
    ),
    "writing clearly": (
        "Use short sentences.",
        "Choose plain words.",
        "Cut what is not needed.",
        "One idea per paragraph.",
        "Read it aloud.",
        "Give examples.",
    ),
    "reducing stress": (
        "Breathe slowly.",
        "Go for a walk.",
        "Make a list.",
        "Talk to someone.",
        "Say no more often.",
        "Switch off your phone.",
    ),
    "saving energy": (
        "Turn off lights.",
        "Wash at low heat.",
        "Seal the windows.",
        "Use LED bulbs.",
        "Dry clothes on a line.",
        "Lower the heating a little.",
    ),
    "public speaking": (
        "Know your audience.",
        "Rehearse aloud.",
        "Speak slowly.",
        "Look at people.",
        "Open with a story.",
        "End on one clear point.",
    ),
    "traveling light": (
        "Roll your clothes.",
        "Wear the heavy shoes.",
        "Pack one color scheme.",
        "Use small bottles.",
        "Leave books at home.",
        "Make a list and cut it.",
    ),
}

# How-to -> steps in order.
STEPS = {
    "make tea": ("Boil water.", "Put a tea bag in a cup.", "Pour the water.", "Wait three minutes.", "Remove the bag."),
    "plant a seed": (
        "Fill a pot with soil.",
        "Make a small hole.",
        "Drop the seed in.",
        "Cover it.",
        "Water it gently.",
    ),
    "boil an egg": (
        "Bring water to a boil.",
        "Lower the egg in.",
        "Wait eight minutes.",
        "Cool it in cold water.",
        "Peel it.",
    ),
    "send an e-mail": (
        "Open a new message.",
        "Enter the address.",
        "Write a subject.",
        "Type your text.",
        "Press send.",
    ),
    "wash a car": (
        "Rinse off the dust.",
        "Soap it from the top down.",
        "Scrub the wheels.",
        "Rinse again.",
        "Dry with a soft cloth.",
    ),
    "change a light bulb": (
        "Switch off the power.",
        "Let the bulb cool.",
        "Unscrew it.",
        "Screw in the new one.",
        "Switch the power on.",
    ),
    "fold a shirt": (
        "Lay it face down.",
        "Fold in the sleeves.",
        "Fold the sides.",
        "Fold up the bottom.",
        "Turn it over.",
    ),
    "tie a shoelace": (
        "Cross the laces.",
        "Pull one under.",
        "Make a loop.",
        "Wrap the other lace around.",
        "Pull both loops tight.",
    ),
    "write an essay": ("Choose a topic.", "Make an outline.", "Write a draft.", "Revise it.", "Proofread it."),
    "paint a wall": (
        "Cover the floor.",
        "Tape the edges.",
        "Apply a primer.",
        "Roll on two coats.",
        "Remove the tape.",
    ),
}
