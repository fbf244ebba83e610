"""Models and an optimizer of which every rank holds a part."""
