"""Moving KV blocks between engines and tiers. Imports no torch: pools are bytes of the host's memory here."""
