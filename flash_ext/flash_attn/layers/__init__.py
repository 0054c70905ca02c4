"""``flash_attn.layers``: of its modules there is ``rotary``."""
