"""Records to token ids and labels, by a template whose masks are proven."""
