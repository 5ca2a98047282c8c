//! A list of commands that a first process runs one after the other, as arguments of the first process.
//!
//! Each command is encoded as `MAX_OUTPUT_BYTES ENV_COUNT [NAME=VALUE]... ARGV_COUNT ARGUMENT...`. The counts alone say
//! where a command ends, so no argument can be taken for the beginning of another command.

use std::ffi::OsString;

/// One command of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedCommand {
    /// The number of bytes of standard output after which the command is killed.
    pub max_output_bytes: u64,
    /// Variables for the command, each as NAME=VALUE.
    pub env: Vec<String>,
    /// The program and its arguments. The program is always present.
    pub argv: Vec<String>,
}

/// Encodes commands as arguments.
pub fn encode_commands(commands: &[ListedCommand]) -> Vec<String> {
    let mut arguments = vec![];
    for ListedCommand { max_output_bytes, env, argv } in commands {
        arguments.push(max_output_bytes.to_string());
        for texts in [env, argv] {
            arguments.push(texts.len().to_string());
            arguments.extend_from_slice(texts);
        }
    }
    arguments
}

/// Decodes the arguments of [`encode_commands`]. There is at least one command.
///
/// # Errors
/// Returns a message if the arguments are not an encoded list.
pub fn decode_commands(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Vec<ListedCommand>, String> {
    let mut arguments = arguments.into_iter().peekable();
    let mut commands = vec![];
    while arguments.peek().is_some() {
        let max_output_bytes = decode_number(&mut arguments)?;
        let [env, argv] = [decode_texts(&mut arguments)?, decode_texts(&mut arguments)?];
        if argv.first().is_none_or(String::is_empty) {
            return Err(INVALID_LIST_MESSAGE.to_owned());
        }
        commands.push(ListedCommand { max_output_bytes, env, argv });
    }
    if commands.is_empty() { Err(INVALID_LIST_MESSAGE.to_owned()) } else { Ok(commands) }
}

fn decode_texts(arguments: &mut impl Iterator<Item = OsString>) -> Result<Vec<String>, String> {
    let count = decode_number(arguments)?;
    // The list grows with the arguments that are there, whatever number was given.
    (0..count).map(|_| decode_text(arguments)).collect()
}

fn decode_number(arguments: &mut impl Iterator<Item = OsString>) -> Result<u64, String> {
    decode_text(arguments)?.parse().map_err(|_| INVALID_LIST_MESSAGE.to_owned())
}

fn decode_text(arguments: &mut impl Iterator<Item = OsString>) -> Result<String, String> {
    let text = arguments.next().and_then(|text| text.into_string().ok());
    text.ok_or_else(|| INVALID_LIST_MESSAGE.to_owned())
}

const INVALID_LIST_MESSAGE: &str = "`--commands` needs a list of commands, each as \
     `MAX_OUTPUT_BYTES ENV_COUNT [NAME=VALUE]... ARGV_COUNT PROGRAM [ARGUMENT]...`";
