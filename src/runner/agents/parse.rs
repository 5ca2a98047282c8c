//! The parser of an agent's file. Each error names the line, the key and the correction.

use std::io;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::definition::{self, AgentDefinition, ExternalFile, FileContent};
use super::validate::DefinitionKeyError;
use crate::base::regular_file::read_regular_file;

/// An error of loading the catalog.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    #[error("cannot read `{}`", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("there is no agent in `{}`; an agent is a file that ends in `.toml`", .0.display())]
    Empty(PathBuf),
    #[error("{}:{line}: {}{what}", file.display(), key_prefix(key))]
    Invalid { file: PathBuf, line: usize, key: String, what: String },
}

/// Loads the definition of one agent from its file and the files beside it.
pub(super) fn load_file(path: &Path) -> Result<AgentDefinition, CatalogError> {
    let text = read_file(path)?;
    let mut entry = parse_definition(path, &text)?;
    for (name, text) in &mut entry.files {
        let FileContent::External(ExternalFile { file }) = text else { continue };
        let beside = path.with_file_name(&file);
        let read = read_file(&beside)?;
        tracing::trace!(agent = entry.name, file = %name.display(), "read a text of the agent's");
        *text = FileContent::Inline(read);
    }
    Ok(entry)
}

/// Parses a definition from `text`, the content of the file at `path`.
pub(super) fn parse_definition(path: &Path, text: &str) -> Result<AgentDefinition, CatalogError> {
    let invalid = |line, key, reason| CatalogError::Invalid {
        file: path.to_owned(),
        line,
        key,
        what: reason,
    };
    let line = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
    let at = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
    let broken =
        |error: toml::de::Error| invalid(line(at(&error)), String::new(), toml_message(&error));
    let document = DeTable::parse(text).map_err(broken)?;
    let document = document.get_ref();
    // 1. Keys that no longer exist. An explanation is more helpful than "unknown field".
    for (removed_key, advice) in REMOVED_KEYS {
        if let Some(offset) = key_offset(document, removed_key) {
            return Err(invalid(line(offset), (*removed_key).to_owned(), (*advice).to_owned()));
        }
    }
    let entry: AgentDefinition = toml::from_str(text).map_err(|error| {
        // 2. A field that is missing from the whole document has the position 0, where another key may be. So no key is
        //    named.
        let is_missing = at(&error) == 0 && error.message().starts_with("missing field");
        let key = key_at(document, at(&error)).filter(|_| !is_missing).unwrap_or_default();
        invalid(line(at(&error)), key, toml_message(&error))
    })?;
    // 3. The rules between the keys. These errors name a key, and the line is looked up in the document.
    let checked = entry.check().and_then(|()| check_file_name(path, &entry));
    checked.map_err(|DefinitionKeyError { key, what: reason }| {
        let at_key = nearest_offset(document, key);
        invalid(line(at_key), key.to_owned(), reason)
    })?;
    Ok(entry)
}

fn check_file_name(path: &Path, entry: &AgentDefinition) -> Result<(), DefinitionKeyError> {
    let expected = definition::definition_file_name(&entry.name);
    if path.file_name().is_some_and(|name| name == expected.as_str()) {
        return Ok(());
    }
    let reason = format!("the file of `{}` is named `{expected}`; rename one of them", entry.name);
    Err(DefinitionKeyError { key: "name", what: reason })
}

fn read_file(path: &Path) -> Result<String, CatalogError> {
    let unreadable = |source| CatalogError::Unreadable { path: path.to_owned(), source };
    read_regular_file(path, MAX_FILE_BYTES).map_err(unreadable)
}

fn toml_message(error: &toml::de::Error) -> String {
    error.message().replace('\n', "; ")
}

/// Returns the beginning of a message about a key.
fn key_prefix(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("`{key}`: ") }
}

/// Returns the position of a dotted key, if the document contains the key.
fn key_offset(table: &DeTable<'_>, key: &str) -> Option<usize> {
    let (first, rest) = key.split_once('.').unwrap_or((key, ""));
    let (name, value) = table.iter().find(|(name, _)| name.get_ref() == first)?;
    if rest.is_empty() {
        return Some(name.span().start);
    }
    match value.get_ref() {
        DeValue::Table(table) => key_offset(table, rest),
        _ => None,
    }
}

/// Returns the position of a dotted key. If the key is absent, returns the position of the nearest table above the key.
fn nearest_offset(document: &DeTable<'_>, key: &str) -> usize {
    let above = || key.rsplit_once('.').map(|(above, _)| nearest_offset(document, above));
    key_offset(document, key).or_else(above).unwrap_or_default()
}

/// Returns the dotted key whose name or value contains the byte position `at`.
fn key_at(table: &DeTable<'_>, at: usize) -> Option<String> {
    table.iter().find_map(|(name, value)| {
        // The deepest key wins: the search enters tables, and tables in arrays, before it considers the key itself. The
        // index of an array is not part of the dotted key.
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

/// The keys that were removed or belong into another file, with the message for each key.
const REMOVED_KEYS: &[(&str, &str)] = &[
    (
        "conversation",
        "it was removed; set `setup = \"messages\"`: the agent then reads `.cogni/messages.json`",
    ),
    ("relay.extract", HOST_ONLY_KEY_MESSAGE),
    ("relay.quarantine", HOST_ONLY_KEY_MESSAGE),
    ("policy.body.models", "set an agent's models as `allow` in `[models]`"),
    (
        "policy.body.capabilities",
        "set `capabilities = […]` at the top of the file, before all tables",
    ),
];

const HOST_ONLY_KEY_MESSAGE: &str = "only the host's file (`--relay-config`) sets these limits; an agent's file may have `[relay.policy]`";

/// The maximum size in bytes of an agent's file, or of a file beside it (our choice). People write such files.
const MAX_FILE_BYTES: u64 = 1 << 20;
