//! Parsers for values of the flags of `run`.

use crate::base::hidden_characters::escape_hidden;
use crate::sandbox::UserRange;

/// Parses the range of one user.
pub(super) fn parse_single_user(given: &str) -> Result<UserRange, &'static str> {
    let user = given.parse().ok().filter(|range: &UserRange| range.only_user().is_some());
    user.ok_or("give the number of one user, from 1 to 2147483647, such as 1000")
}

/// Refuses a word that is no flag, and says where a program and a message belong.
pub(super) fn explain_missing_dashes(given: &str) -> Result<String, String> {
    Err(format!(
        "the program and its arguments come after `--`: `cogni-gateway run … -- {}`; the message for an agent comes after `--message`",
        escape_hidden(given)
    ))
}

/// Parses `NAME=VALUE`.
pub(super) fn parse_variable(given: &str) -> Result<(String, String), String> {
    let (name, value) = given.split_once('=').ok_or("give NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}
