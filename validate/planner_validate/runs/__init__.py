"""From a plan to processes and back: what is started, watched and ended; torch is not imported here."""
