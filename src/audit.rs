//! Append-only record of what each run did, chained so that any change is found.

pub mod record;
