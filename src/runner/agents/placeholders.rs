//! Placeholders in an agent's arguments, such as `${RUN_ID}`, for values that are known only when a run begins.
//!
//! Each argument is expanded by itself and stays a single argument, whatever its value contains, because no shell is
//! involved. `$${` stands for a literal `${`.

use std::time::Duration;

/// The values of the placeholders for one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceholderValues {
    pub run_id: String,
    /// The run's ID in a form with characters that every program accepts in a name.
    pub session_id: String,
    pub model: String,
    /// The agent within OpenClaw that has to answer.
    pub agent: String,
    /// The last message of a user.
    pub message: String,
    /// The time within which the agent has to answer.
    pub timeout: Duration,
}

/// The error of an argument that is longer than the kernel allows.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the message has {length} bytes, and the agent takes it as an argument, which may have {MAX_ARGUMENT_BYTES}; give less"
)]
pub struct ArgumentTooLongError {
    length: usize,
}

impl PlaceholderValues {
    /// Returns the arguments with the values in place of the placeholders.
    ///
    /// # Errors
    /// Returns an error if an argument is longer than the kernel allows.
    pub fn expand(&self, argv: &[String]) -> Result<Vec<String>, ArgumentTooLongError> {
        let filled = argv.iter().map(|word| match self.expand_argument(word) {
            word if word.len() > MAX_ARGUMENT_BYTES => {
                Err(ArgumentTooLongError { length: word.len() })
            }
            word => Ok(word),
        });
        filled.collect()
    }

    fn expand_argument(&self, word: &str) -> String {
        let mut filled = String::with_capacity(word.len());
        for part in TemplateParser(word) {
            match part {
                TemplatePart::Text(text) => filled.push_str(text),
                TemplatePart::Name(name) => {
                    filled.push_str(&self.value_of(name).unwrap_or_default());
                }
            }
        }
        filled
    }

    fn value_of(&self, name: &str) -> Option<String> {
        Some(match name {
            "RUN_ID" => self.run_id.clone(),
            "SESSION_ID" => self.session_id.clone(),
            "MODEL" => self.model.clone(),
            "AGENT" => self.agent.clone(),
            "MESSAGE" => self.message.clone(),
            "PROMPT_FILE" => PROMPT_FILE.to_owned(),
            "TIMEOUT" => self.timeout.as_secs().to_string(),
            _ => return None,
        })
    }
}

/// Returns the error message for the first unknown placeholder of an argument, if there is one.
pub(super) fn unknown_placeholder(word: &str) -> Option<String> {
    let unknown = TemplateParser(word).find_map(|part| match part {
        TemplatePart::Name(name) if !PLACEHOLDER_NAMES.contains(&name) => Some(name),
        _ => None,
    })?;
    let known: Vec<_> = PLACEHOLDER_NAMES.iter().map(|name| format!("`${{{name}}}`")).collect();
    let known = known.join(", ");
    Some(format!(
        "there is no `${{{unknown}}}`; there is {known}, and `$${{` is a `${{` of its own"
    ))
}

enum TemplatePart<'a> {
    Text(&'a str),
    Name(&'a str),
}

/// An iterator over the texts and placeholders of an argument. The string is the rest that is not parsed yet.
struct TemplateParser<'a>(&'a str);

impl<'a> Iterator for TemplateParser<'a> {
    type Item = TemplatePart<'a>;

    fn next(&mut self) -> Option<TemplatePart<'a>> {
        let rest = self.0;
        if rest.is_empty() {
            return None;
        }
        if let Some(after) = rest.strip_prefix("$${") {
            self.0 = after;
            return Some(TemplatePart::Text("${"));
        }
        if let Some(after) = rest.strip_prefix("${") {
            // A placeholder without `}` becomes a name up to the argument's end. Such a name is always unknown, so the
            // check reports it.
            let (name, after) = after.split_once('}').unwrap_or((after, ""));
            self.0 = after;
            return Some(TemplatePart::Name(name));
        }
        // The first character is skipped: a `$` that begins no placeholder is text.
        let next = rest.char_indices().skip(1).find(|(_, c)| *c == '$');
        let (text, after) = rest.split_at(next.map_or(rest.len(), |(at, _)| at));
        self.0 = after;
        Some(TemplatePart::Text(text))
    }
}

/// The path of the last message of a user in the sandbox.
pub const PROMPT_FILE: &str = "/workspace/.cogni/prompt.txt";

/// The names of the known placeholders.
const PLACEHOLDER_NAMES: [&str; 7] =
    ["RUN_ID", "SESSION_ID", "MODEL", "AGENT", "MESSAGE", "PROMPT_FILE", "TIMEOUT"];

/// The maximum length of an argument in bytes. The kernel allows 128 KiB, of which the last byte is the terminating
/// zero.
const MAX_ARGUMENT_BYTES: usize = 128 * 1024 - 1;
