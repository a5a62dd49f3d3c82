"""The page for people: the same questions and plans as the API's, in HTML made here."""
