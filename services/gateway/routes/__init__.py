"""The routes of the gateway other than those of one API: status, administration, tokens, models."""
