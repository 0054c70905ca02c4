"""flash_ext as a part of other libraries. None of them is imported before one of these modules is asked for it."""
