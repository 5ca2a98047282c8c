//! R8: Tests of the live output of a run: an agent's text and tool calls are rendered wherever the lines are split, and
//! control sequences of any program are removed.

use cogni_gateway::cli::run::output_renderer::{OpenLineFlag, OutputRenderer};
use tokio::io::AsyncWriteExt;

const OUTPUT: &str = concat!(
    "cogni-init: a line of the program\n",
    "{\"type\":\"text_delta\",\"text\":\"Let me \"}\n",
    "{\"type\":\"text_delta\",\"text\":\"look: ü\\n\"}\n",
    "{\"type\":\"text_delta\",\"text\":\"now\"}\n",
    "{\"type\":\"tool_call\",\"id\":\"1\",\"argv\":[\"sh\",\"-c\",\"echo 'a b'; exit 3\",\"\"]}\n",
    "{\"type\":\"tool_result\",\"id\":\"1\",\"exit_code\":3}\n",
    "{\"type\":\"tool_call\",\"id\":\"2\",\"argv\":[\"ls\",\"-l\"]}\n",
    "{\"type\":\"tool_result\",\"id\":\"2\",\"exit_code\":0}\n",
    "{\"type\":\"tool_result\",\"id\":\"3\",\"exit_code\":null}\n",
    "{\"type\":\"text_delta\",\"text\":\"\\u001b[2Jdone\\u0007\"}\n",
    "{\"payloads\":[],\"meta\":{}}\n",
    "{\"type\":\"something_else\"}\n",
    "its last words",
);

async fn render_chunks(chunks: impl Iterator<Item = &[u8]>) -> String {
    let mut seen = vec![];
    let mut shown = OutputRenderer::for_events(&mut seen, OpenLineFlag::default());
    for chunk in chunks {
        shown.write_all(chunk).await.unwrap();
        shown.flush().await.unwrap();
    }
    shown.shutdown().await.unwrap();
    drop(shown);
    String::from_utf8(seen).unwrap()
}

/// Copies to the clipboard, sets the title and clears the screen, in 7-bit and in 8-bit form, and contains bytes that
/// are not text.
const HOSTILE: &[u8] = b"a\x1b]52;c;ZXZpbA==\x07b\x1b]0;title\x1b\\c\x1b[2Jd\xc2\x9b2Je\x9b2Jf\xffg\r\n\th\ri \xc3\xbc\n";

/// R3: Output of a sandbox is displayed without any effect on the terminal.
#[tokio::test]
async fn a_program_gives_no_commands_to_the_terminal() {
    let text = async |chunks: &mut dyn Iterator<Item = &[u8]>| {
        let mut seen = vec![];
        let mut shown = OutputRenderer::for_text(&mut seen, OpenLineFlag::default());
        for chunk in chunks {
            shown.write_all(chunk).await.unwrap();
            shown.flush().await.unwrap();
        }
        drop(shown);
        String::from_utf8(seen).unwrap()
    };
    let whole = text(&mut [HOSTILE].into_iter()).await;
    let harmless =
        "a?]52;c;ZXZpbA==?b?]0;title?\\c?[2Jd?2Je?2Jf?g\n\th?i ü\n".replace('?', "\u{fffd}");
    assert_eq!(whole, harmless);
    for at in 0..HOSTILE.len() {
        assert_eq!(
            text(&mut [&HOSTILE[..at], &HOSTILE[at..]].into_iter()).await,
            whole,
            "cut at {at}"
        );
    }
    assert_eq!(text(&mut HOSTILE.chunks(1)).await, whole);
}

#[tokio::test]
async fn an_agent_is_shown_as_one_would_read_it() {
    let bytes = OUTPUT.as_bytes();
    let whole = render_chunks([bytes].into_iter()).await;
    insta::assert_snapshot!(whole, @r#"
    cogni-init: a line of the program
    Let me look: ü
    now
    $ sh -c 'echo '\''a b'\''; exit 3' ''
    exit code 3
    $ ls -l
    killed, or not started
    �[2Jdone�
    {"type":"something_else"}
    its last words
    "#);
    for at in 0..bytes.len() {
        assert_eq!(
            render_chunks([&bytes[..at], &bytes[at..]].into_iter()).await,
            whole,
            "cut at {at}"
        );
    }
    assert_eq!(render_chunks(bytes.chunks(1)).await, whole);
}
