//! G4, G12: which trace a call is part of is never the client's to say, and what the collector is told.

mod context;
mod spans;
