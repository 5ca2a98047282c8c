//! The fields of readable log lines: every control character of a value is escaped, so that a text of another party is
//! neither a line of its own nor a command to a terminal.

use std::fmt::{self, Debug, Write};

use tracing::field::Field;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

use crate::base::hidden_characters::is_hidden;

/// A writer that escapes control characters.
struct EscapingTextWriter<'a, 'b>(&'a mut Writer<'b>);

/// Returns the format of the fields: the message alone, and each other field with its name.
pub(super) fn text_fields() -> impl for<'a> FormatFields<'a> + Send + Sync + 'static {
    debug_fn(write_field).delimited(" ")
}

fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    match field.name() {
        "message" => (),
        name if writer.has_ansi_escapes() => {
            write!(writer, "{ITALIC}{name}{PLAIN}{DIMMED}={PLAIN}")?;
        }
        name => write!(writer, "{name}=")?,
    }
    write!(EscapingTextWriter(writer), "{value:?}")
}

impl Write for EscapingTextWriter<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.chars().try_for_each(|c| match c {
            c if c.is_control() => write!(self.0, "{}", c.escape_debug()),
            c if is_hidden(c) => write!(self.0, "{}", c.escape_unicode()),
            c => self.0.write_char(c),
        })
    }
}

const ITALIC: &str = "\x1b[3m";
const DIMMED: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct CollectedLines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for CollectedLines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_text_of_another_party_stays_in_its_line() {
        let lines = CollectedLines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt().fmt_fields(text_fields()).with_ansi(false);
        let log = log.without_time().with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(log, || {
            let forged = "ERR x\n2026 ERROR forged\r\u{1b}[2J\u{9b}1m\u{202e}\u{200b}\u{fe0f}";
            let _span = tracing::error_span!("run", text = %forged).entered();
            tracing::warn!(error = %forged, size = 3, quoted = "a\nb", "told: {forged}");
        });
        let lines = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        insta::assert_snapshot!(lines.trim(), @r#"WARN run{text=ERR x\n2026 ERROR forged\r\u{1b}[2J\u{9b}1m\u{202e}\u{200b}\u{fe0f}}: cogni_gateway::cli::log::text::tests: told: ERR x\n2026 ERROR forged\r\u{1b}[2J\u{9b}1m\u{202e}\u{200b}\u{fe0f} error=ERR x\n2026 ERROR forged\r\u{1b}[2J\u{9b}1m\u{202e}\u{200b}\u{fe0f} size=3 quoted="a\nb""#);
    }
}
