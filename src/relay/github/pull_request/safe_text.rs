//! Makes an agent's text harmless for a page that notifies people, closes issues and loads pictures.
//!
//! A zero-width space behind each character that would start an action separates the character from the text after it.
//! The text looks the same, in a sentence and in code. The separation also holds if the page's text becomes a commit's
//! message, as squashing does.
//!
//! The separated texts are:
//!
//! - `@name`, which notifies.
//! - `#12` and `GH-12`, which refer to issues, and which close them after a word like `fixes`.
//! - Such a word before a URL.
//! - `](`, `][`, `]:`, `://` and `www.`, which make links.
//! - `![`, HTML tags and HTML comments, which load pictures, hide text, or end the relay's section.
//! - `&` before a name or a number, and `\` before `-` and `:`, which would write one of these characters differently.
//! - Three backticks or tildes before a word, which would draw a diagram or a map of a code block. Names of usual
//!   programming languages stay.
//!
//! Each line of an agent's text is quoted. So a reader sees where the text ends, and no code block or list of the text
//! includes the relay's text behind it.

use crate::base::hidden_characters::is_hidden;

/// Returns a title of one line and limited length: the first line of `title` with text, or `otherwise`.
pub fn format_title(title: &str, otherwise: &str) -> String {
    let line: String =
        title.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().into();
    let line = neutralize_markup(&truncate(&line, MAX_TITLE_CHARS));
    if line.is_empty() { otherwise.to_owned() } else { line }
}

/// Returns a text in one line of limited length. The caller puts the line into code quotes or a title.
pub fn format_line(given: &str, characters: usize) -> String {
    let words = given.split_whitespace().collect::<Vec<_>>().join(" ");
    truncate(&words, characters)
}

/// Returns a text as a code block that the text cannot end. Empty for a text without visible characters.
pub fn format_code_block(given: &str, characters: usize) -> String {
    let text = neutralize_markup(truncate(given.trim(), characters).trim()).replace('`', "'");
    if text.trim().is_empty() { String::new() } else { format!("```text\n{text}\n```") }
}

/// Returns the harmless form of an agent's text of several paragraphs, as a quote in Markdown. Empty for a text without
/// visible characters.
pub fn format_quote(body: &str) -> String {
    let text = neutralize_markup(truncate(body, MAX_AGENT_TEXT_CHARS).trim());
    let lines: Vec<_> = text.trim().lines().map(|line| format!("> {line}")).collect();
    lines.join("\n")
}

/// Returns the harmless form of a text that the relay puts into a list.
pub fn format_sentence(given: &str) -> String {
    neutralize_markup(&format_line(given, MAX_SENTENCE_CHARS))
}

/// Returns a name in code quotes, for a sentence of the relay's.
pub fn format_code(name: &str) -> String {
    // A code span ends with its paragraph, so that a name with an empty line would leave it.
    let name = name.replace(['\n', '\t'], " ");
    format!("`{}`", neutralize_markup(&name).replace('`', "'"))
}

/// Removes unprintable characters, and separates every character that would start an action.
fn neutralize_markup(source: &str) -> String {
    let source: String = source.chars().filter(|&c| is_printable(c)).collect();
    let mut text = String::with_capacity(source.len());
    for (at, c) in source.char_indices() {
        text.push(c);
        let (before, after) = source.split_at(at + c.len_utf8());
        if triggers_action(c, before, after) {
            text.push(ZERO_WIDTH_SPACE);
        }
    }
    text
}

/// Returns true if a character, the last one of `before`, starts an action together with the text `after` it.
fn triggers_action(c: char, before: &str, after: &str) -> bool {
    let next = after.chars().next().unwrap_or_default();
    match c {
        '@' => next.is_ascii_alphanumeric(),
        '`' | '~' => {
            before.ends_with(if c == '`' { "```" } else { "~~~" }) && is_before_renderer(c, after)
        }
        '#' => next.is_ascii_digit(),
        '-' => next.is_ascii_digit() && ends_with_any(before, &["gh-"]),
        '!' => next == '[',
        ']' => matches!(next, '(' | '[' | ':'),
        ':' => after.starts_with("//"),
        'w' | 'W' if next == '.' => ends_with_any(before, &["www"]),
        '&' => next == '#' || next.is_ascii_alphabetic(),
        '\\' => matches!(next, '-' | ':'),
        '<' => next.is_ascii_alphabetic() || matches!(next, '/' | '!' | '?'),
        // The cheap test comes first: `is_before_address` walks over all blanks, and only runs behind a closing
        // keyword.
        _ => ends_with_any(before, CLOSING_KEYWORDS) && is_before_address(after),
    }
}

/// Returns true if a text begins with an optional colon, blanks and a URL, as in `: https://…`.
fn is_before_address(text: &str) -> bool {
    let rest = text.strip_prefix(':').unwrap_or(text);
    let address = rest.trim_start();
    let starts = |scheme: &str| {
        address.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    };
    address.len() < rest.len() && (starts("http:") || starts("https:"))
}

/// Returns true if the text after a fence of the character `sign` names something that a page could draw: a word that
/// is no usual programming language.
fn is_before_renderer(sign: char, text: &str) -> bool {
    let info = text.trim_start_matches([' ', '\t']);
    if info.is_empty() || info.starts_with('\n') || info.starts_with(sign) {
        return false;
    }
    let word = info.split(char::is_whitespace).next().unwrap_or_default();
    !LANGUAGES.iter().any(|language| word.eq_ignore_ascii_case(language))
}

/// Returns true if a text ends with one of the words, in any case.
fn ends_with_any(text: &str, words: &[&str]) -> bool {
    words.iter().any(|word| {
        let at = text.len().checked_sub(word.len());
        at.and_then(|at| text.get(at..)).is_some_and(|end| end.eq_ignore_ascii_case(word))
    })
}

/// Returns true if a reader sees a character, or if the character only joins or styles the visible ones beside it.
fn is_printable(c: char) -> bool {
    let is_joiner = matches!(c, '\u{200c}' | '\u{200d}' | '\u{fe0e}' | '\u{fe0f}');
    !is_hidden(c) || is_joiner || matches!(c, '\n' | '\t')
}

/// Cuts a text to a number of characters, and marks the cut by `…`.
fn truncate(text: &str, characters: usize) -> String {
    let mut truncated: String = text.chars().take(characters).collect();
    if truncated.len() < text.len() {
        truncated.push('…');
    }
    truncated
}

/// The words with which GitHub closes an issue:
/// <https://docs.github.com/en/issues/tracking-your-work-with-issues/using-issues/linking-a-pull-request-to-an-issue>
const CLOSING_KEYWORDS: &[&str] =
    &["close", "closes", "closed", "fix", "fixes", "fixed", "resolve", "resolves", "resolved"];

/// The languages whose code blocks keep their colours.
const LANGUAGES: &[&str] = &[
    "bash",
    "c",
    "cpp",
    "css",
    "diff",
    "go",
    "html",
    "java",
    "javascript",
    "js",
    "json",
    "kotlin",
    "php",
    "py",
    "python",
    "rb",
    "rs",
    "ruby",
    "rust",
    "sh",
    "sql",
    "swift",
    "text",
    "toml",
    "ts",
    "tsx",
    "typescript",
    "xml",
    "yaml",
    "yml",
];

/// A zero-width space, which separates characters and is not visible.
const ZERO_WIDTH_SPACE: char = '\u{200b}';

/// The longest title in characters. GitHub allows 256, and a separated character counts twice.
const MAX_TITLE_CHARS: usize = 120;

/// The longest text of an agent in characters: more than people read. GitHub's limit has room for several such texts.
const MAX_AGENT_TEXT_CHARS: usize = 8_000;

/// The longest text in a list of the relay's, in characters. Our choice.
const MAX_SENTENCE_CHARS: usize = 1_000;
