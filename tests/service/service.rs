//! The service whole: what somebody who holds a grant asks for, in sandboxes of the embedded driver, with a provider
//! and a forge behind it (A1–A5, B1, B4, R5, R7, S1).

mod chat;
mod clock;
mod evidence;
mod full_disk;
mod given_up;
mod killed;
mod many;
mod restored;
mod rules;
mod told;
mod unwritten;
mod upgrade;

use crate::support::service::{Place, ask};
