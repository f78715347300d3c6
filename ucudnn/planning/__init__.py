"""Planning: which configuration each kernel gets, by workspace reuse (WR) or workspace division (WD)."""
