"""From the question to the best plan: legal candidates, bounds, exact decisions within a candidate, explanation.

Nothing here knows physics or frameworks; both arrive as coefficients (``planner.cost``) and rules
(``planner.backends``).
"""
