// java Ask.java PATH QUESTION URL MODEL: asks one question with java.net.http.HttpClient as it comes, which offers h2c, and prints the
// answer or the refusal. QUESTION is `plain`, `stream`, or `tool`: a question whose answer needs a call of a tool.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.Map;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

public class Ask {
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static final String SCHEMA = "{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"}}}";
    static final String HELLO = "{\"role\":\"user\",\"content\":\"hello\"}";
    // The start of a body, a tool, and the two messages of its call, by path. CALL is the call's id.
    static final Map<String, String[]> BODIES = Map.of(
            "/v1/chat/completions", new String[] {
                "\"messages\":[" + HELLO,
                "{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":" + SCHEMA + "}}",
                ",{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"CALL\",\"type\":\"function\","
                        + "\"function\":{\"name\":\"weather\",\"arguments\":\"{}\"}}]},"
                        + "{\"role\":\"tool\",\"tool_call_id\":\"CALL\",\"content\":\"rain over Ulm\"}",
                "\"id\":\"(call_[^\"]*)\"", "\"content\":\"([^\"]*)\""},
            "/v1/responses", new String[] {
                "\"input\":[" + HELLO,
                "{\"type\":\"function\",\"name\":\"weather\",\"parameters\":" + SCHEMA + ",\"strict\":false}",
                ",{\"type\":\"function_call\",\"call_id\":\"CALL\",\"name\":\"weather\",\"arguments\":\"{}\"},"
                        + "{\"type\":\"function_call_output\",\"call_id\":\"CALL\",\"output\":\"rain over Ulm\"}",
                "\"call_id\":\"([^\"]*)\"", "\"(?:delta|text)\":\"([^\"]*)\""},
            "/v1/messages", new String[] {
                "\"max_tokens\":64,\"messages\":[" + HELLO,
                "{\"name\":\"weather\",\"input_schema\":" + SCHEMA + "}",
                ",{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"CALL\",\"name\":\"weather\",\"input\":{}}]},"
                        + "{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"CALL\","
                        + "\"content\":\"rain over Ulm\"}]}",
                "\"id\":\"(toolu_[^\"]*)\"", "\"text\":\"([^\"]*)\""});

    public static void main(String[] arguments) throws Exception {
        String path = arguments[0], question = arguments[1], url = arguments[2] + path, model = arguments[3];
        String[] body = BODIES.get(path);
        String start = "{\"model\":\"" + model + "\"," + (question.equals("stream") ? "\"stream\":true," : "");
        String tools = question.equals("tool") ? "],\"tools\":[" + body[1] + "]}" : "]}";
        String answer = post(url, start + body[0] + tools);
        if (question.equals("tool")) {
            String id = first(body[3], answer);
            answer = post(url, start + body[0] + body[2].replace("CALL", id) + tools);
        }
        String text = Pattern.compile(body[4]).matcher(answer).results().map(found -> found.group(1)).collect(Collectors.joining());
        System.out.println(text);
    }

    static String post(String url, String body) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(url))
                .header("content-type", "application/json")
                .header("anthropic-version", "2023-06-01")
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
        HttpResponse<String> response = CLIENT.send(request, HttpResponse.BodyHandlers.ofString());
        if (response.statusCode() != 200) {
            System.out.println(response.statusCode() + ": " + response.body());
            System.exit(1);
        }
        return response.body();
    }

    static String first(String pattern, String text) {
        return Pattern.compile(pattern).matcher(text).results().findFirst().orElseThrow().group(1);
    }
}
