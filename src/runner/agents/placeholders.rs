//! What stands for something that is known only when a run begins: `${RUN_ID}` in an argument of a program.
//!
//! Each argument is filled in by itself, and stays one argument, whatever it is filled with: there is no shell. A `$${`
//! is a `${` that stands for itself.

use std::time::Duration;

/// What there is to fill in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceholderValues {
    pub run_id: String,
    /// The run's id, in the characters that every program takes for a name.
    pub session_id: String,
    pub model: String,
    /// Which agent of an agent's own is asked.
    pub agent: String,
    /// The last thing that a user has said.
    pub message: String,
    /// How long the agent may take.
    pub timeout: Duration,
}

/// An argument of a program that would be longer than the kernel takes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the message has {given} bytes, and the agent takes it as an argument, which may have {MAX_ARGUMENT_BYTES}; give less"
)]
pub struct ArgumentTooLongError {
    given: usize,
}

impl PlaceholderValues {
    /// The arguments, filled in.
    ///
    /// # Errors
    /// One is longer than an argument may be.
    pub fn expand(&self, argv: &[String]) -> Result<Vec<String>, ArgumentTooLongError> {
        let filled = argv.iter().map(|word| match self.expand_argument(word) {
            word if word.len() > MAX_ARGUMENT_BYTES => {
                Err(ArgumentTooLongError { given: word.len() })
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

/// What is wrong with an argument's placeholders, if something is.
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

/// An argument, taken apart.
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
            // One that does not end is a name that nobody knows.
            let (name, after) = after.split_once('}').unwrap_or((after, ""));
            self.0 = after;
            return Some(TemplatePart::Name(name));
        }
        let next = rest.char_indices().skip(1).find(|(_, c)| *c == '$');
        let (text, after) = rest.split_at(next.map_or(rest.len(), |(at, _)| at));
        self.0 = after;
        Some(TemplatePart::Text(text))
    }
}

/// Where in the workspace the last thing is that a user has said.
pub const PROMPT_FILE: &str = "/workspace/.cogni/prompt.txt";

const PLACEHOLDER_NAMES: [&str; 7] =
    ["RUN_ID", "SESSION_ID", "MODEL", "AGENT", "MESSAGE", "PROMPT_FILE", "TIMEOUT"];

/// The kernel takes 128 KiB for an argument, of which the last byte is its end.
const MAX_ARGUMENT_BYTES: usize = 128 * 1024 - 1;
