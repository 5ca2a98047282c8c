//! From a file to an entry; what is wrong is told with its line, its key, and what would be right.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::check::Wrong;
use super::entry::{self, Beside, Entry, Text};

/// Why there is no catalog.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read `{}`", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("there is no agent in `{}`; an agent is a file that ends in `.toml`", .0.display())]
    Empty(PathBuf),
    #[error("{}:{line}: {}{what}", file.display(), shown(key))]
    Invalid { file: PathBuf, line: usize, key: String, what: String },
}

/// Reads one file.
pub(super) fn file(path: &Path) -> Result<Entry, Error> {
    let text = read(path)?;
    let mut entry = entry(path, &text)?;
    for (name, text) in &mut entry.files {
        let Text::Beside(Beside { file }) = text else { continue };
        let beside = path.with_file_name(&file);
        let read = read(&beside)?;
        tracing::trace!(agent = entry.name, file = %name.display(), "read a text of the agent's");
        *text = Text::Here(read);
    }
    Ok(entry)
}

/// Reads what `text` says, which is that of the file at `path`.
pub(super) fn entry(path: &Path, text: &str) -> Result<Entry, Error> {
    let invalid = |line, key, what| Error::Invalid { file: path.to_owned(), line, key, what };
    let line = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
    let at = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
    let broken = |error: toml::de::Error| invalid(line(at(&error)), String::new(), of_toml(&error));
    let document = DeTable::parse(text).map_err(broken)?;
    let document = document.get_ref();
    for (gone, now) in GONE {
        if let Some(place) = place(document, gone) {
            return Err(invalid(line(place), (*gone).to_owned(), (*now).to_owned()));
        }
    }
    let entry: Entry = toml::from_str(text).map_err(|error| {
        // What is missing from the whole is told of its first key.
        let is_missing = at(&error) == 0 && error.message().starts_with("missing field");
        let key = key_at(document, at(&error)).filter(|_| !is_missing).unwrap_or_default();
        invalid(line(at(&error)), key, of_toml(&error))
    })?;
    let checked = entry.check().and_then(|()| check_file_name(path, &entry));
    checked.map_err(|Wrong { key, what }| {
        let place = nearest(document, key);
        invalid(line(place), key.to_owned(), what)
    })?;
    Ok(entry)
}

fn check_file_name(path: &Path, entry: &Entry) -> Result<(), Wrong> {
    let right = entry::file_name(&entry.name);
    if path.file_name().is_some_and(|name| name == right.as_str()) {
        return Ok(());
    }
    let what = format!("the file of `{}` is named `{right}`; rename one of them", entry.name);
    Err(Wrong { key: "name", what })
}

fn read(path: &Path) -> Result<String, Error> {
    let unreadable = |source| Error::Unreadable { path: path.to_owned(), source };
    let size = fs::metadata(path).map_err(unreadable)?.len();
    if size > LARGEST {
        let why = format!("it has {size} bytes; an agent's files have at most {LARGEST}");
        return Err(unreadable(io::Error::other(why)));
    }
    fs::read_to_string(path).map_err(unreadable)
}

fn of_toml(error: &toml::de::Error) -> String {
    error.message().replace('\n', "; ")
}

/// Before a message that is about a key.
fn shown(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("`{key}`: ") }
}

/// Where the value of a dotted key begins.
fn place(table: &DeTable<'_>, key: &str) -> Option<usize> {
    let (first, rest) = key.split_once('.').unwrap_or((key, ""));
    let (name, value) = table.iter().find(|(name, _)| name.get_ref() == first)?;
    if rest.is_empty() {
        return Some(name.span().start);
    }
    match value.get_ref() {
        DeValue::Table(table) => place(table, rest),
        _ => None,
    }
}

/// Where a dotted key stands, or else the table that it belongs into.
fn nearest(document: &DeTable<'_>, key: &str) -> usize {
    let above = || key.rsplit_once('.').map(|(above, _)| nearest(document, above));
    place(document, key).or_else(above).unwrap_or_default()
}

/// The dotted key whose value has the byte at `at`, or which stands there itself.
fn key_at(table: &DeTable<'_>, at: usize) -> Option<String> {
    table.iter().find_map(|(name, value)| {
        let own = || Some(name.get_ref().to_string());
        let inner = match value.get_ref() {
            DeValue::Table(table) => key_at(table, at),
            DeValue::Array(list) => list.iter().find_map(|one| match one.get_ref() {
                DeValue::Table(table) => key_at(table, at),
                _ => None,
            }),
            _ => None,
        };
        match inner {
            Some(inner) => Some(format!("{}.{inner}", name.get_ref())),
            None if name.span().contains(&at) || value.span().contains(&at) => own(),
            None => None,
        }
    })
}

/// Keys that were, or belong elsewhere, and what is to be said in their place.
const GONE: &[(&str, &str)] = &[
    (
        "conversation",
        "it is gone; say `setup = \"messages\"`, and the agent finds it in `.cogni/messages.json`",
    ),
    ("relay.extract", OF_THE_MACHINE),
    ("relay.quarantine", OF_THE_MACHINE),
    ("policy.body.models", "an agent's models are said in `allow` of `[models]`"),
    (
        "policy.body.capabilities",
        "an agent's are said by `capabilities = […]` of its own, before all tables",
    ),
];

const OF_THE_MACHINE: &str = "how much may come out of a sandbox is this host's to say, in its own file (`--relay-config`); an agent has `[relay.policy]`";

/// An agent's file, or one beside it, is some lines for people.
const LARGEST: u64 = 1 << 20;
