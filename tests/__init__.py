"""The tests, and what they share: `tests.helpers`, and modules beside the tests that alone use them."""
