//! Who may ask for what: bearer tokens with scopes, of which only hashes are kept.
